-- The work of one batch: any statements, none of which ends the transaction.
delete from totals where day = current_date;
insert into totals (day, orders) select current_date, count(*) from orders where ordered_on = current_date;
