-- Who is in the way of a lease, and `gaffer release`, which takes it away from a run that does not let go.

-- Who has locked a row of this table, and how to end that. The row names one transaction (its `xmax`); where that is not
-- the one (it locked in a savepoint, or several share the lock), all who have locked a row of this table may be it.
create function gaffer.blockers(p_table regclass, p_xmax xid)
returns table (who text, cure text, since timestamptz)  -- null: it is not visible
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    with locks as materialized (
        select * from pg_catalog.pg_locks
    ), locker as (
        select l.virtualtransaction, l.pid, xid.transactionid,
               coalesce(bool_or(xid.transactionid = p_xmax) over (partition by l.virtualtransaction), false) as is_it
          from (select distinct virtualtransaction, pid from locks
                 where locktype = 'relation' and relation = p_table and granted
                   and database = (select oid from pg_catalog.pg_database where datname = current_database())
                   and mode <> 'AccessShareLock' and pid is distinct from pg_backend_pid()) as l
          left join locks as xid on xid.locktype = 'transactionid' and xid.granted
                                 and xid.virtualtransaction = l.virtualtransaction
         where not exists (select from locks as wanted
                            where wanted.virtualtransaction = l.virtualtransaction and not wanted.granted)
    ), suspect as (
        select virtualtransaction, pid, min(transactionid::text) as transactionid from locker
         where is_it or not exists (select from locker where is_it)
         group by virtualtransaction, pid
    )
    select case when p.gid is not null
                then format('prepared transaction %L (user %s, since %s)', p.gid, p.owner, date_trunc('second', p.prepared))
                else format('backend %s (user %s, application %s, %s)', s.pid, a.usename, nullif(a.application_name, ''),
                            coalesce(a.state || ' since ' || date_trunc('second', a.state_change),
                                     'state not visible: grant pg_read_all_stats')) end,
           case when p.gid is not null then format('rollback prepared %L', p.gid)
                else format('select pg_terminate_backend(%s)', s.pid) end,
           coalesce(p.prepared, a.xact_start)
      from suspect as s
      left join pg_catalog.pg_stat_activity as a on a.pid = s.pid
      left join pg_catalog.pg_prepared_xacts as p on s.pid is null and p.transaction::text = s.transactionid
     order by s.pid
     limit 3
$$;

create function gaffer.lease_blockers(p_job text, p_slot integer) returns table (who text, cure text)
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select b.who, b.cure
      from gaffer.job_lease l cross join lateral gaffer.blockers('gaffer.job_lease', l.xmax) b
     where l.job = p_job and l.slot = p_slot
$$;

-- Takes the lease away from whoever holds it, in this slot or (null) in all: nothing more of that run is committed, and
-- another one is asked for. `p_fence`: only the holder that has it, whom somebody has looked at. Returns the leases as
-- they were; none: nobody held one, and nothing is changed.
create function gaffer.release(p_job text, p_slot integer, p_by text, p_reason text, p_fence bigint default null)
returns setof gaffer.job_lease
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_lease gaffer.job_lease;
begin
    perform gaffer.raise_durability();
    for v_lease in select * from gaffer.lock_leases(p_job, p_slot)
                    where lease_id is not null and (p_fence is null or fence = p_fence) loop
        update gaffer.job_lease
           set fence = fence + 1, lease_id = null, lease_until = 'epoch', holder_pid = null, holder_began_at = null,
               gone_at = null
         where job = p_job and slot = v_lease.slot;
        if gaffer.abandon(p_job, v_lease.slot, null, v_lease.lease_until,
                          format('released by %s%s', p_by, ': ' || p_reason)) then
            update gaffer.job set follow_up_at = gaffer.clock() where name = p_job;
        end if;
        insert into gaffer.operator_action (job, action, at, by, reason, details)
        values (p_job, 'release', gaffer.clock(), p_by, p_reason,
                jsonb_build_object('slot', v_lease.slot, 'fence', v_lease.fence, 'owner', v_lease.owner));
        return next v_lease;
    end loop;
end $$;
