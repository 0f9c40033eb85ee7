-- Who may do what with gaffer's tables: four roles that nobody logs in as, with no more rights than each needs.
--
--   gaffer_owner     owns the schema and all in it. Who migrates is a member, and who owns the tables that are prepared
--                    or protected
--   gaffer_runner    registers jobs, runs them, watches and delivers: Dagster's code location, daemon and runs,
--                    `gaffer run`, `gaffer watch`. Changes rows through functions only. All runners of one database
--                    trust each other: each may do any job's work
--   gaffer_reader    looks: `gaffer status`, `runs`, `audit`, `check`, `metrics`; Grafana
--   gaffer_operator  what people do: pause, resume, release, the watermark, items, mute, rename, retire, prune.
--                    gaffer.operator_action keeps the role that logged in, whatever name was given
--
-- Run it as a role that may make roles, and owns the schema gaffer or is a superuser; again after each migration, as any
-- member of gaffer_owner: `gaffer migrate --roles`, or `psql -f deploy/roles.sql`. A login is made a member:
--
--   grant gaffer_runner to shop_app;
--
-- What jobs read and write is yours to grant, to the login: SELECT on a source (and UPDATE, for PendingRows), INSERT and
-- what else a job's own SQL does on a target, USAGE on their schemas. Who shows or sets a watermark reads its source.
--
-- The four belong to the server, not to this database: who is a member has the same rights in each database of the
-- server that has gaffer's tables, as far as he may connect to it, and PUBLIC may. Where that is too much, in each:
--
--   revoke connect on database shop from public;
--   grant connect on database shop to shop_app;
--
-- Who owned some of it before, and is no superuser, becomes a member of gaffer_owner, lest what runs as him stops; take
-- that back when it runs as a member of gaffer_runner. Changing an owner locks the table: do that while nothing runs.
--
-- One statement: it is done as a whole, or not at all. A role of one of these names that was not made here, or may do
-- more than a group, is refused and stays as it is. Rights in the schema gaffer that these four were given otherwise are
-- taken back.

do $roles$
declare
    c_mark constant text := 'of gaffer_dagster: see deploy/roles.sql';
    v_name text;
    v_role record;
    v_is text;
    v_each text;
    v_owners name[];
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    foreach v_name in array array['gaffer_owner', 'gaffer_runner', 'gaffer_reader', 'gaffer_operator'] loop
        select * into v_role from pg_roles where rolname = v_name;
        if not found then
            execute format('create role %I nologin', v_name);
            execute format('comment on role %I is %L', v_name, c_mark);
            continue;
        end if;
        v_is := concat_ws(', ',
            case when shobj_description(v_role.oid, 'pg_authid') is distinct from c_mark then 'was not made here' end,
            case when v_role.rolcanlogin then 'may log in' end,
            case when v_role.rolsuper then 'is a superuser' end,
            case when v_role.rolcreaterole then 'may make roles' end,
            case when v_role.rolcreatedb then 'may make databases' end,
            case when v_role.rolreplication then 'may replicate' end,
            case when v_role.rolbypassrls then 'is above row-level security' end,
            (select 'is a member of ' || string_agg(roleid::regrole::text, ' and ' order by roleid::regrole::text)
               from pg_auth_members where member = v_role.oid));
        if v_is <> '' then
            raise exception 'the role % exists already, and %; nothing was changed. Let it be a group without other rights '
                '(alter role % nologin nosuperuser nocreaterole nocreatedb noreplication nobypassrls; revoke what it is a '
                'member of), and if it is meant to be gaffer''s: comment on role % is %; or rename it',
                v_name, v_is, v_name, v_name, quote_literal(c_mark) using errcode = 'duplicate_object';
        end if;
    end loop;

    -- All that is in the schema belongs to the one owner, whoever migrated: functions work with their owner's rights.
    if not pg_has_role('gaffer_owner', 'usage') then
        execute format('grant gaffer_owner to %I', current_user);
    end if;
    v_owners := array(
        select r.rolname from pg_roles r
         where not r.rolsuper and not pg_has_role(r.oid, 'gaffer_owner', 'usage')
           and r.oid in (select nspowner from pg_namespace where nspname = 'gaffer'
                         union select relowner from pg_class where relnamespace = 'gaffer'::regnamespace
                         union select proowner from pg_proc where pronamespace = 'gaffer'::regnamespace));
    for v_each in
        select 'schema gaffer' from pg_namespace where nspname = 'gaffer' and nspowner <> 'gaffer_owner'::regrole
        union all
        select case relkind when 'v' then 'view ' when 'c' then 'type ' else 'table ' end || oid::regclass
          from pg_class
         where relnamespace = 'gaffer'::regnamespace and relkind in ('r', 'p', 'v', 'c')
           and relowner <> 'gaffer_owner'::regrole
        union all
        select 'function ' || oid::regprocedure
          from pg_proc where pronamespace = 'gaffer'::regnamespace and proowner <> 'gaffer_owner'::regrole
    loop
        execute format('alter %s owner to gaffer_owner', v_each);
    end loop;
    foreach v_name in array v_owners loop
        execute format('grant gaffer_owner to %I', v_name);
    end loop;

    revoke all on schema gaffer from public, gaffer_runner, gaffer_reader, gaffer_operator;
    revoke all on all tables in schema gaffer from public, gaffer_runner, gaffer_reader, gaffer_operator;
    revoke all on all functions in schema gaffer from public, gaffer_runner, gaffer_reader, gaffer_operator;

    grant usage on schema gaffer to gaffer_runner, gaffer_reader, gaffer_operator;
    grant select on
        gaffer.alert, gaffer.alert_delivery, gaffer.delivery_status, gaffer.job, gaffer.job_item, gaffer.job_lease,
        gaffer.job_runs, gaffer.job_spec, gaffer.job_status, gaffer.job_watermark, gaffer.migration, gaffer.open_alert,
        gaffer.operator_action, gaffer.protected_table, gaffer.receiver, gaffer.watch, gaffer.watch_gap,
        gaffer.watch_status
        to gaffer_runner, gaffer_reader, gaffer_operator;
    -- They only look.
    grant execute on function
        gaffer.advisory_key, gaffer.clock, gaffer.cluster, gaffer.is_gone, gaffer.require_protection, gaffer.until_of
        to gaffer_runner, gaffer_reader, gaffer_operator;
    grant execute on function
        -- one run
        gaffer.base_of_spec, gaffer.register, gaffer.register_external, gaffer.acquire, gaffer.renew, gaffer.begin_batch,
        gaffer.lock_batch, gaffer.charge_item, gaffer.commit_batch, gaffer.supersede, gaffer.lost_lease, gaffer.end_run,
        -- watching, and telling
        gaffer.begin_pass, gaffer.note_incidents, gaffer.learn_run, gaffer.note_learnt, gaffer.note_reports,
        gaffer.claim_notices, gaffer.note_delivery, gaffer.note_ping
        to gaffer_runner;
    grant execute on function
        gaffer.pause, gaffer.resume, gaffer.release, gaffer.set_watermark, gaffer.adopt, gaffer.change_items,
        gaffer.ack_alert, gaffer.mute, gaffer.rename, gaffer.retire, gaffer.allow_writes,
        gaffer.prunable_runs, gaffer.prunable_alerts, gaffer.begin_prune, gaffer.prune_runs, gaffer.prune_alerts
        to gaffer_operator;
    -- Takes only what no rule reads.
    grant execute on function gaffer.note_operation to gaffer_runner, gaffer_operator;
end $roles$;
