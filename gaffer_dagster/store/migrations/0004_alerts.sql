-- Who looks for silence, and what was found.
--
--   watch            whoever looks, and when it looked last; a stretch in which nobody did is in watch_gap
--   watch_turn       its one row is locked by whoever is at a pass
--   alert            an incident: at most one is open for each job (or watch) and kind
--
-- A pass is one transaction: begin_pass · what is wrong is read and judged (domain/incident.py) · note_incidents, which
-- looks at each job's row again. What is opened, reminded or resolved is then delivered: 0005_delivery.sql.

create table gaffer.watch (
    name          text primary key check (length(name) <= 500),
    every         interval                     -- how often it means to look; null: it does not say
                  check (every > interval '0' and every <= interval '31 days'),
    first_seen_at timestamptz not null,
    last_pass_at  timestamptz not null,
    passes        bigint not null default 0,
    jobs          text[] not null default '{}',   -- the jobs that are defined where it looks
    learnt_until  timestamptz                  -- the runs that its orchestrator recorded are known up to here
                  check (learnt_until between '0001-01-02 00:00+00' and '9999-01-01 00:00+00')
);

create table gaffer.watch_gap (
    id       bigint generated always as identity primary key,
    since_at timestamptz not null,
    until_at timestamptz not null,
    watch    text not null                     -- who was the first to look again
);

create index watch_gap_until on gaffer.watch_gap (until_at);

-- No advisory lock: whoever may connect can take any, and keep it, and nobody would look any more.
create table gaffer.watch_turn (
    is_only boolean primary key default true check (is_only)
);
insert into gaffer.watch_turn default values;

create table gaffer.alert (
    id          bigint generated always as identity primary key,
    key         uuid not null unique default gen_random_uuid(),
    job         text references gaffer.job (name) on update cascade,
    watch       text,
    kind        text not null check (kind in ('absence', 'failures', 'capped', 'backlog', 'stalled', 'parked', 'takeovers',
                                              'pause', 'vanished', 'versions', 'watch')),
    severity    text not null check (severity in ('warning', 'error')),
    since_at    timestamptz not null           -- when it became true
                check (since_at between '0001-01-02 00:00+00' and '9999-01-01 00:00+00'),
    opened_at   timestamptz not null,          -- when it was seen
    details     jsonb not null check (gaffer.is_plain('what was found', details) and jsonb_typeof(details) = 'object'),
    reminders   integer not null default 0,
    reminded_at timestamptz,
    acked_at    timestamptz,
    acked_by    text,
    ack_reason  text,
    resolved_at timestamptz,
    check ((job is null) <> (watch is null)),
    check (greatest(opened_at, reminded_at, acked_at, resolved_at) < '9999-01-01 00:00+00'),
    check (least(opened_at, reminded_at, acked_at, resolved_at) > '0001-01-02 00:00+00'),
    check (greatest(length(watch), length(acked_by), length(ack_reason)) <= 20000)
);

create unique index alert_open_job on gaffer.alert (job, kind) where resolved_at is null and job is not null;
create unique index alert_open_watch on gaffer.alert (watch, kind) where resolved_at is null and watch is not null;

-- The pass of one watch begins: null while another is at it, and raises where one has been for longer than a pass takes,
-- since nobody then looks. A watch that says how often it looks, and finds that
-- nobody did for longer, notes the gap: no job is called absent for a tick of it before it had its grace anew. A job
-- that was defined where this watch looks and is not any more, nor elsewhere, has vanished.
create function gaffer.begin_pass(p_watch text, p_every interval, p_jobs text[]) returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    c_pass constant interval := '1 minute';  -- none takes longer
    v_now timestamptz;
    v_last timestamptz;
    v_watch gaffer.watch;
    v_every interval;
    v_who text;
    v_cure text;
begin
    if p_every not between interval '1 millisecond' and interval '31 days' then
        raise exception 'a watch looks every 31 days at least, and not more often than each millisecond; not each %', p_every
            using errcode = 'invalid_parameter_value';
    end if;
    v_every := make_interval(secs => extract(epoch from p_every)::double precision);
    perform gaffer.raise_durability();
    -- A watch that is stopped in the middle must not stop the others.
    perform set_config('idle_in_transaction_session_timeout', '10s', true);
    perform from gaffer.watch_turn for update skip locked;
    if not found then
        v_now := gaffer.clock();
        select max(last_pass_at) into v_last from gaffer.watch where last_pass_at <= v_now + interval '5 minutes';
        -- Who comes when both are to look finds the last pass so old, and the other one at it.
        if v_last > v_now - c_pass - coalesce(v_every, interval '0') then
            return null;
        end if;
        -- The other one may have begun just now.
        begin
            perform from gaffer.watch_turn for update;
            if not found then  -- the row was lost, as in a restore: whoever makes it again has the turn
                insert into gaffer.watch_turn default values on conflict do nothing;
                perform from gaffer.watch_turn for update;
            end if;
        exception when lock_not_available then
            select string_agg(who, ', or '), string_agg(cure, '; or ') into v_who, v_cure
              from gaffer.blockers('gaffer.watch_turn', (select t.xmax from gaffer.watch_turn t));
            raise exception 'nobody looks for what is wrong%: the turn to do so is held by %; end that transaction%',
                coalesce(' since ' || date_trunc('second', v_last), ''), coalesce(v_who, 'somebody who is gone by now'),
                coalesce(': ' || v_cure, '') using errcode = 'GF010';
        end;
    end if;
    v_now := gaffer.clock();
    begin
        -- What a clock that ran ahead for a while has written.
        delete from gaffer.watch_gap where until_at > v_now + interval '5 minutes';
        update gaffer.watch set last_pass_at = v_now where last_pass_at > v_now + interval '5 minutes';
        select * into v_watch from gaffer.watch where name = p_watch;
        select max(last_pass_at) into v_last from gaffer.watch;
        if v_every is not null and v_last < v_now - greatest(interval '1 minute', 3 * v_every) then
            insert into gaffer.watch_gap (since_at, until_at, watch) values (v_last, v_now, p_watch);
        end if;
        if p_jobs is distinct from v_watch.jobs then
            update gaffer.job set vanished_at = v_now
             where name = any (v_watch.jobs) and name <> all (p_jobs) and vanished_at is null
               and not exists (select from gaffer.watch w where w.name <> p_watch and job.name = any (w.jobs));
            update gaffer.job set vanished_at = null where name = any (p_jobs) and vanished_at is not null;
        end if;
        insert into gaffer.watch (name, every, first_seen_at, last_pass_at, passes, jobs)
        values (p_watch, v_every, v_now, v_now, 1, p_jobs)
        on conflict (name) do update
           set every = v_every, last_pass_at = v_now, passes = watch.passes + 1,
               jobs = case when watch.jobs = p_jobs then watch.jobs else p_jobs end;
    exception when lock_not_available then
        select string_agg(who, ', or '), string_agg(cure, '; or ') into v_who, v_cure
          from gaffer.blockers('gaffer.watch', (select w.xmax from gaffer.watch w where w.name = p_watch));
        if v_who is null then
            select string_agg(who, ', or '), string_agg(cure, '; or ') into v_who, v_cure
              from gaffer.blockers('gaffer.job', null);
        end if;
        raise exception 'nobody looks for what is wrong from here: what a pass writes is locked by %; end that transaction%',
            coalesce(v_who, 'somebody who is gone by now'), coalesce(': ' || v_cure, '') using errcode = 'GF010';
    end;
    return v_now;
end $$;

create type gaffer.incident as (
    alert    bigint,        -- null: it is to be opened
    verb     text,          -- open, remind, update, resolve
    job      text,
    watch    text,
    row      text,          -- the version of the job's row that was judged
    kind     text,
    severity text,
    since_at timestamptz,
    details  jsonb
);

-- Opens, reminds, resolves, and says what has changed, each only if the job's row is still what was judged: where a run has just ended, the
-- next pass judges anew. Returns what was opened, reminded of and resolved.
create function gaffer.note_incidents(p_now timestamptz, p_incidents gaffer.incident[]) returns setof gaffer.alert
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_judged gaffer.incident[];
begin
    if p_now is null or p_now not between gaffer.clock() - interval '1 hour' and gaffer.clock() + interval '5 minutes' then
        raise exception 'incidents are noted at the time of the pass, not at %', p_now
            using errcode = 'invalid_parameter_value';
    end if;
    -- Not waiting for whoever changes a row, since it is changing.
    select array_agg(i) into v_judged from unnest(p_incidents) i
     where i.watch is not null
        or exists (select from gaffer.job j where j.name = i.job and j.xmin::text = i.row for share skip locked);
    return query
        insert into gaffer.alert (job, watch, kind, severity, since_at, opened_at, details)
        select i.job, i.watch, i.kind, i.severity, i.since_at, p_now, i.details
          from unnest(v_judged) i where i.verb = 'open'
        on conflict do nothing
        returning *;
    update gaffer.alert a set details = i.details
      from unnest(v_judged) i
     where a.id = i.alert and i.verb = 'update' and a.resolved_at is null;
    return query
        update gaffer.alert a
           set details = i.details,
               reminders = a.reminders + (i.verb = 'remind')::integer,
               reminded_at = case when i.verb = 'remind' then p_now else a.reminded_at end,
               resolved_at = case when i.verb = 'resolve' then p_now end
          from unnest(v_judged) i
         where a.id = i.alert and i.verb in ('remind', 'resolve') and a.resolved_at is null
        returning a.*;
end $$;

-- Somebody knows of an open incident: it is not reminded of any more.
create function gaffer.ack_alert(p_alert bigint, p_by text, p_reason text) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_alert gaffer.alert;
begin
    update gaffer.alert set acked_at = gaffer.clock(), acked_by = p_by, ack_reason = p_reason
     where id = p_alert and resolved_at is null
    returning * into v_alert;
    if not found then
        return false;
    end if;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (v_alert.job, 'ack', v_alert.acked_at, p_by, p_reason, jsonb_strip_nulls(jsonb_build_object(
                'alert', p_alert, 'kind', v_alert.kind, 'watch', v_alert.watch)));
    return true;
end $$;

-- Until then nothing is sent of the job's incidents; they are kept all the same. Null: speak again.
create function gaffer.mute(p_job text, p_until timestamptz, p_by text, p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update gaffer.job set muted_until = p_until where name = p_job;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, case when p_until is null then 'unmute' else 'mute' end, gaffer.clock(), p_by, p_reason,
            jsonb_build_object('until', p_until));
end $$;

-- A job, or a watch, that is not meant to run any more: nothing is missed of it. A job that is registered again is back,
-- and so is a watch that looks again.
create function gaffer.retire(p_name text, p_by text, p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_by text[];
begin
    delete from gaffer.watch where name = p_name;
    if found then
        update gaffer.alert set resolved_at = gaffer.clock(), details = details || '{"over": "retired"}'
         where watch = p_name and resolved_at is null;
        insert into gaffer.operator_action (job, action, at, by, reason, details)
        values (null, 'retire', gaffer.clock(), p_by, p_reason, jsonb_build_object('watch', p_name));
        return;
    end if;
    select array_agg(name order by name) into v_by from gaffer.watch where p_name = any (jobs);
    if v_by is not null then
        raise exception 'job "%" is still defined (where % looks): take it out of the code first', p_name,
            array_to_string(v_by, ', ') using errcode = 'GF008';
    end if;
    update gaffer.job set retired_at = gaffer.clock() where name = p_name;
    if not found then
        raise exception 'no job and no watch is called "%" (see: gaffer status, gaffer check)', p_name
            using errcode = 'GF006';
    end if;
    insert into gaffer.operator_action (job, action, at, by, reason)
    values (p_name, 'retire', gaffer.clock(), p_by, p_reason);
end $$;
