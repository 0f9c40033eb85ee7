-- The tables of this example. Then: gaffer migrate, and gaffer prepare flights --key id --apply.
create table flights (id bigint primary key, carrier text, delay int);
create table carriers (carrier text primary key, flights bigint);
create table delays (flight bigint, minutes int);
