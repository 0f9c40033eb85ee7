-- The tables of gaffer_dagster. Everything lives in the schema `gaffer`; nothing is put into `public`.
--
--   job              a job as last seen: its spec, whether it is paused, its last success, its failure streak
--   job_spec         each spec that a job ever had, and each schedule in the order in which the job went by them
--   job_lease        who may write for a job: one row for each slot, with the fence that decides at COMMIT
--   job_watermark    how far the job has got; moves only in the transaction that also carries the batch's writes
--   job_runs         one row for each attempt that reached the database
--   operator_action  who did what to which job (or table, watch, database), and why
--   watch, alert, …  who looks for silence, and what was found: 0004_alerts.sql
--   job_item         rows that failed and are tried again, or were given up: 0008_items.sql
--   migration        which of these files were applied
--
-- What always holds:
--   * `job_lease.fence` only grows; with `lease_id` it names one acquisition for ever.
--   * A batch's writes, the watermark and the counters on `job_runs` commit together, or not at all.
--   * At most one run of a slot is `running`, and it is the one that the lease names.
--   * A run ends once: `ended_at` is set exactly when `outcome` is no longer `running`.
--
-- Every time is the answer of gaffer.clock(); every function pins its search path; PUBLIC may do nothing.

create function gaffer.clock() returns timestamptz
language sql volatile
set search_path = pg_catalog, pg_temp
as 'select pg_catalog.clock_timestamp()';

comment on function gaffer.clock() is
    'The one clock of all SQL here. A test database may replace its body; nothing else may.';

-- What one writes, all read, with programs that fall over what is nested too deep, or over a number too large for them.
create function gaffer.is_plain(p_what text, p_json jsonb) returns boolean
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_path_exists(p_json, '$.**{20}') or length(p_json::text) > 4000000
       or jsonb_path_exists(p_json, '$.**{0 to 19} ? (@ > 1e100 || @ < -1e100)') then
        raise exception '% is JSON that not everybody could read: nested 20 levels or more, longer than four million '
            'characters, or with a number beyond 1e100; let it be plainer', p_what
            using errcode = 'invalid_parameter_value';
    end if;
    return true;
end $$;

-- How far a position is one in time, as our own kinds write it. Null: it is none, or another program's, which may have
-- an "until" of its own; a cast of that would end the work on all jobs.
create function gaffer.until_of(p_position jsonb) returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz;
begin
    if jsonb_typeof(p_position -> 'until') is distinct from 'string'
       or p_position ->> 'until' !~ '^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?([+-]\d\d:\d\d|Z)$' then
        return null;
    end if;
    v_until := (p_position ->> 'until')::timestamptz;
    return case when v_until between '0001-01-02 00:00+00' and '9999-01-01 00:00+00' then v_until end;
exception when data_exception then
    return null;
end $$;

-- Who keeps something from being due: {"who": in words, "xid": tells one from another, "cure": how to end it}.
create function gaffer.is_holder(p_json jsonb) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select p_json is null
        or (jsonb_typeof(p_json -> 'who') = 'string'
            and coalesce(jsonb_typeof(p_json -> 'xid') in ('string', 'null'), true)
            and coalesce(jsonb_typeof(p_json -> 'cure') in ('string', 'null'), true)
            and length(p_json::text) <= 20000) is true
$$;

create table gaffer.job (
    name                 text primary key check (name ~ '^[a-z0-9][a-z0-9_./-]{0,127}$'),
    spec                 jsonb not null check (gaffer.is_plain('the spec', spec)),
    spec_hash            text not null,
    work_hash            text,             -- what the job does, without its name: tells a rename from a new job
    zone_data            text,             -- of the worker that registered it last: version and rules of its zone
    slots                integer not null default 1 check (slots > 0),  -- how many runs may work side by side
    first_seen_at        timestamptz not null,
    paused_at            timestamptz,
    paused_until         timestamptz,
    paused_by            text,
    pause_reason         text,
    covered_until        timestamptz,      -- every tick up to here that was not skipped is covered by a run
    skipped_until        timestamptz,      -- ticks up to here that were not covered by then were skipped as late
    last_success_at      timestamptz,
    last_success_tick    timestamptz,
    consecutive_failures integer not null default 0 check (consecutive_failures >= 0),
    failed_ticks         timestamptz[] not null default '{}',  -- the streak's newest hundred: a tick counts once
    next_due_at          timestamptz,      -- the earliest tick that is neither covered nor skipped
    follow_up_at         timestamptz,      -- from then on a run is wanted without waiting for a tick
    wanted_at            timestamptz,      -- the last wake-up that met a holder

    -- What the rules of 0004_alerts.sql are read from, so that no history is needed for them.
    rules_at             timestamptz not null,  -- since when its schedule, bounds and alerts are what they are
    grace                interval not null      -- of its alerts: tells the watch who is in time
                         check (grace between interval '0' and interval '3653 days'),
    late_tick            timestamptz,      -- the earliest tick that was skipped as late and not made up for since
    -- As far as they ended later than the tick that is waited for, the newest hundred of each:
    paused               tstzrange[] not null default '{}',  -- the pauses that are over
    worked               tstzrange[] not null default '{}',  -- when runs were at work that did not cover it
    failed_at            timestamptz[] not null default '{}',  -- when each of the streak's failures was: a hundred
    consecutive_capped   integer not null default 0 check (consecutive_capped >= 0),
    capped_at            timestamptz[] not null default '{}',  -- when each of those was: a hundred
    due_since            timestamptz,      -- since when something due is left, as far as runs know
    held_since           timestamptz,      -- since when something waits for a transaction that is open elsewhere
    held_by              jsonb check (gaffer.is_plain('held_by', held_by) and gaffer.is_holder(held_by)),  -- whose
    held_by_since        timestamptz,      -- since when that one was seen to stand
    parked               bigint not null default 0 check (parked >= 0),
    parked_at            timestamptz,
    taken_over_at        timestamptz[] not null default '{}',  -- the newest hundred runs that were found dead
    version              text,             -- of its definition
    version_before       text,
    returned_at          timestamptz[] not null default '{}',  -- when the version before came back: the newest ten
    vanished_at          timestamptz,      -- nobody who defined it defines it any more
    retired_at           timestamptz,      -- it is not meant to run any more
    pruned_until         timestamptz,      -- runs that began, or covered ticks, up to here may have been removed
    muted_until          timestamptz,
    pinged_at            timestamptz,      -- the last success that its heartbeat was sent for
    runs_ended           bigint not null default 0,
    run_seconds          double precision not null default 0,
    leases_lost          bigint not null default 0,
    check (greatest(length(spec_hash), length(work_hash), length(zone_data), length(paused_by), length(pause_reason),
                    length(version)) <= 20000),
    check (paused_at is not null or (paused_until is null and paused_by is null and pause_reason is null)),
    -- A date that most programs cannot read would keep everybody from reading about any job; so in the other tables.
    check (greatest(first_seen_at, paused_at, paused_until, covered_until, skipped_until, last_success_tick, next_due_at,
                    follow_up_at, late_tick, due_since, pinged_at, muted_until) < '9999-01-01 00:00+00'),
    check (least(first_seen_at, paused_at, paused_until, covered_until, skipped_until, last_success_tick, next_due_at,
                 follow_up_at, late_tick, due_since, pinged_at, muted_until) > '0001-01-02 00:00+00')
);

-- A spec that comes back (a rollback) has another row if it brings another schedule with it.
create table gaffer.job_spec (
    id            bigint generated always as identity primary key,
    job           text not null references gaffer.job (name) on update cascade,
    spec_hash     text not null,
    spec          jsonb not null,
    first_seen_at timestamptz not null,
    registered_at timestamptz not null,     -- it took the place of the row before
    since_at      timestamptz not null      -- its ticks count from then on: before registered_at, where versions alternate
                  check (since_at between '0001-01-02 00:00+00' and '9999-01-01 00:00+00')
);

create index job_spec_history on gaffer.job_spec (job, id);
create index job_spec_hash on gaffer.job_spec (job, spec_hash, id);

-- No index but the key, and none may be added on a column that a renewal changes: updates stay in place (HOT).
create table gaffer.job_lease (
    job             text not null references gaffer.job (name) on update cascade,
    slot            integer not null check (slot >= 0),
    fence           bigint not null default 0 check (fence >= 0),
    lease_id        uuid,                    -- made by the client for each acquisition; null when free
    owner           text check (length(owner) <= 20000),  -- for people; never compared
    lease_until     timestamptz not null default 'epoch',
    holder_pid      integer,                 -- of the server's process that renews it, where no pooler is in between
    holder_began_at timestamptz,             -- since when that process is there: its number may come again
    gone_at         timestamptz,             -- since when that process is seen to be gone
    primary key (job, slot)
);

create table gaffer.job_watermark (
    job        text primary key references gaffer.job (name) on update cascade,
    position   jsonb check (gaffer.is_plain('the position', position)),  -- null: at the beginning
    cluster    text check (length(cluster) <= 20000),  -- for positions in xids: the system identifier of their cluster
    updated_at timestamptz not null
);

create table gaffer.job_runs (
    id             bigint generated always as identity primary key,
    job            text not null references gaffer.job (name) on update cascade,
    slot           integer not null,
    fence          bigint,                   -- null where no lease was granted (busy, paused)
    lease_id       uuid unique,
    owner          text not null,
    dagster_run_id text,
    trigger        text not null check (trigger in ('schedule', 'sensor', 'manual', 'command', 'redo')),
    tick           timestamptz,              -- the newest tick of the schedule when the run began
    spec_hash      text not null,
    redo           tstzrange                 -- the interval that was done once more; the watermark stays
                   check (redo <@ tstzrange('0001-01-02 00:00+00', '9999-01-01 00:00+00')),
    zone_data      text,
    cluster        text,
    timeline       integer,
    started_at     timestamptz not null,
    deadline_at    timestamptz,
    ended_at       timestamptz,
    outcome        text not null check (outcome in (
                       'running', 'succeeded', 'partial', 'capped', 'busy', 'paused', 'late', 'interrupted',
                       'failed', 'timed_out', 'lost_lease', 'abandoned')),
    batches        integer not null default 0,
    items          bigint not null default 0,
    parked         bigint not null default 0,
    watermark_from jsonb,
    watermark_to   jsonb,
    covered_until  timestamptz,              -- it covers every tick up to here that was not covered or skipped
    ticks_covered  integer,
    backlog        bigint,                   -- what was due and is left
    next_run_at    timestamptz,
    held_by        jsonb check (gaffer.is_plain('held_by', held_by) and gaffer.is_holder(held_by)),  -- as in gaffer.job
    held_by_since  timestamptz,
    sqlstate       text,
    error          text,
    check (greatest(length(owner), length(dagster_run_id), length(spec_hash), length(zone_data), length(cluster),
                    length(sqlstate), length(error)) <= 20000),
    check ((outcome = 'running') = (ended_at is null)),
    check ((fence is null) = (lease_id is null)),
    check (outcome in ('busy', 'paused', 'late', 'failed') or fence is not null),
    check ((trigger = 'redo') = (redo is not null)),
    check (greatest(tick, started_at, deadline_at, ended_at, covered_until, next_run_at) < '9999-01-01 00:00+00'),
    check (least(tick, started_at, deadline_at, ended_at, covered_until, next_run_at) > '0001-01-02 00:00+00')
);

-- Nobody reads more of this table than what he asks for, however long it is.
-- By number, not by time: the clock may have been wrong for a while.
create index job_runs_history on gaffer.job_runs (job, id desc);
create unique index job_runs_running on gaffer.job_runs (job, slot) where outcome = 'running';
-- The newest run that worked: a job may be paused, and woken, for years.
create index job_runs_worked on gaffer.job_runs (job, slot, id desc)
    where outcome not in ('busy', 'paused', 'late') and trigger <> 'redo';
create index job_runs_ended on gaffer.job_runs (job, ended_at, id);
-- A planner that knows how common a job is looks for its newest run by going through all runs, from the newest on; and
-- it may be one that has not run for a year.
alter table gaffer.job_runs alter column job set statistics 0;

create table gaffer.operator_action (
    id      bigint generated always as identity primary key,
    job     text references gaffer.job (name) on update cascade,  -- null: it was done to what `details` names
    action  text not null,
    at      timestamptz not null,
    by      text not null,                 -- as whoever did it called himself
    role    text not null default session_user,  -- that logged in
    reason  text,
    details jsonb not null default '{}' check (jsonb_typeof(details) = 'object' and gaffer.is_plain('what was done', details)),
    check (greatest(length(action), length(by), length(reason)) <= 20000)
);

create index operator_action_of_job on gaffer.operator_action (job, id);
create index operator_action_pause on gaffer.operator_action (job, id) where action in ('pause', 'resume');
create index operator_action_of_watch on gaffer.operator_action ((details ->> 'watch'), id)
    where details ->> 'watch' is not null;
create index operator_action_of_table on gaffer.operator_action ((details ->> 'table'), id)
    where details ->> 'table' is not null;
create index operator_action_rename on gaffer.operator_action ((details ->> 'from')) where action = 'rename';

-- A fence must never be handed out twice, nor anything be done twice, so a job's leases and watermark are for ever.
create function gaffer.refuse_removal() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'a row of gaffer.% is never removed: %', tg_table_name, tg_argv[0];
end $$;

create trigger keep_lease before delete on gaffer.job_lease
    for each row execute function gaffer.refuse_removal('its fence must not be handed out twice');
create trigger keep_leases before truncate on gaffer.job_lease
    for each statement execute function gaffer.refuse_removal('its fence must not be handed out twice');
create trigger keep_watermark before delete on gaffer.job_watermark
    for each row execute function gaffer.refuse_removal('what its job has done would not be known any more');
create trigger keep_watermarks before truncate on gaffer.job_watermark
    for each statement execute function gaffer.refuse_removal('what its job has done would not be known any more');

-- A fence only grows, and a new holder always gets a larger one.
create function gaffer.refuse_smaller_fence() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if new.fence < old.fence
       or (new.fence = old.fence and new.lease_id is not null and new.lease_id is distinct from old.lease_id) then
        raise exception 'the fence of job "%" only grows: % cannot follow %', old.job, new.fence, old.fence;
    end if;
    return new;
end $$;

create trigger grow_fence before update of fence, lease_id on gaffer.job_lease
    for each row execute function gaffer.refuse_smaller_fence();

-- Moved to another job or slot, it would leave room for a new one, whose fence begins at 0, or leave a job without a
-- watermark. It goes with its job's name.
create function gaffer.refuse_move() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_jsonb(new) -> 'slot' is distinct from to_jsonb(old) -> 'slot' or pg_trigger_depth() < 2 then
        raise exception 'a row of gaffer.% stays with its job, and slot; to give job "%" another name: gaffer rename',
            tg_table_name, old.job;
    end if;
    return new;
end $$;

create trigger stay_lease before update of job, slot on gaffer.job_lease
    for each row execute function gaffer.refuse_move();
create trigger stay_watermark before update of job on gaffer.job_watermark
    for each row execute function gaffer.refuse_move();

-- What was over before a tick says nothing of it. What delayed one tick may have delayed the next one too.
create function gaffer.forget_delay() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tick constant timestamptz := coalesce(new.late_tick, new.next_due_at);
begin
    if v_tick is distinct from coalesce(old.late_tick, old.next_due_at) then
        new.paused := array(select each from unnest(new.paused) as each where upper(each) > v_tick order by each);
        new.worked := array(select each from unnest(new.worked) as each where upper(each) > v_tick order by each);
    end if;
    return new;
end $$;

create trigger forget_delay before update of late_tick, next_due_at on gaffer.job
    for each row execute function gaffer.forget_delay();
