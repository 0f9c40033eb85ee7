-- The line of one run as functions, callable from any language:
--
--     register ─► acquire ─► ( begin_batch … the user's writes … commit_batch )* ─► end_run
--                    │                         renew, meanwhile                       │
--                    └ busy: wanted_at is set                 look again if wanted_at moved
--     supersede: after a COMMIT whose answer was lost
--
-- What people do to a job is in 0003_operation.sql and 0011_release.sql.
--
-- Refusals (SQLSTATE):
--   GF001  the fence is no longer current
--   GF002  a protected table is written outside a fenced batch, or is not protected as its job demands
--   GF003  the run is past its deadline
--   GF004  the transaction of this batch was ended by its own code
--   GF005  the watermark is not where this batch found it, or batches of this run are lost
--   GF006  no such job, run or watermark
--   GF007  a job that is not known does the work of one that is: a rename
--   GF008  a run is at work, or somebody has locked its lease
--   GF009  what is said to be done is still pending
--   GF010  a pass of the watch goes on for longer than one takes
--
-- Lock order, everywhere: the user's rows, then job_lease, then job, then job_watermark and job_runs.

create type gaffer.lease_grant as (
    outcome       text,           -- granted, busy, paused, late, failed (refused, and recorded)
    run_id        bigint,
    fence         bigint,
    granted_at    timestamptz,
    lease_until   timestamptz,
    deadline_at   timestamptz,
    position      jsonb,          -- the watermark, and the cluster that it counts in
    cluster       text,
    batches       integer,        -- committed by this run so far
    first_seen_at timestamptz,
    covered_until timestamptz,    -- ticks up to here are covered or skipped
    wanted_at     timestamptz,
    holder        text,           -- busy: who has it
    free_at       timestamptz     -- busy, and the holder's connection is gone: then, unless it comes back
);

create type gaffer.run_ending as (
    result               text,    -- ended, wanted (look again), lost_lease
    wanted_at            timestamptz
);

-- With `off` or `local` a crash or fail-over loses acknowledged commits; never lowered.
create function gaffer.raise_durability() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
end $$;

create function gaffer.count_failure(p_job text, p_tick timestamptz, p_at timestamptz) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job
       set consecutive_failures = consecutive_failures + 1,
           failed_ticks = case when p_tick is null then failed_ticks
                               else (failed_ticks || p_tick)[greatest(1, cardinality(failed_ticks) - 98):] end,
           failed_at = case when cardinality(failed_at) < 100 then failed_at || p_at else failed_at end
     where name = p_job and (p_tick is null or p_tick <> all (failed_ticks))
$$;

-- A run was at work and did not cover the tick that is waited for: its grace may have run out meanwhile.
-- (Its bounds in order even where nothing is noted: the planner makes the range before it looks for the row.)
create function gaffer.note_work(p_job text, p_from timestamptz, p_until timestamptz) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job
       set worked = (worked || tstzrange(p_from, greatest(p_from, p_until)))[greatest(1, cardinality(worked) - 98):]
     where name = p_job and coalesce(late_tick, next_due_at) < p_until and p_from < p_until
$$;

-- A run gave up rows; they stay so however it ended.
create function gaffer.note_parked(p_job text, p_rows bigint, p_at timestamptz) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_rows > 0 then
        perform gaffer.count_parked(p_job, p_at);
    end if;
end $$;

-- A run was found dead, or its lease was taken from it.
create function gaffer.count_takeover(p_job text, p_at timestamptz) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job
       set leases_lost = leases_lost + 1,
           taken_over_at = (taken_over_at || p_at)[greatest(1, cardinality(taken_over_at) - 98):]
     where name = p_job
$$;

create function gaffer.cluster() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as 'select system_identifier::text from pg_catalog.pg_control_system()';

-- What registering goes by. `base_at`: from when on the ticks of a spec count. A new one, or of a job that was retired:
-- from now on. One that comes back after less than an hour never left: it is one of two code versions that alternate, and
-- the ticks of both count. The rest is of the job as it was.
create function gaffer.base_of_spec(
    p_job text, p_spec_hash text,
    out base_at timestamptz, out next_due_at timestamptz, out schedule jsonb, out paused_at timestamptz,
    out paused_until timestamptz
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
    v_job gaffer.job;
    v_settled timestamptz;
    v_newest gaffer.job_spec;
begin
    select * into v_job from gaffer.job where name = p_job;
    base_at := v_now;
    next_due_at := v_job.next_due_at;
    schedule := v_job.spec -> 'schedule';
    paused_at := v_job.paused_at;
    paused_until := v_job.paused_until;
    if v_job.name is null or v_job.retired_at is not null
       or not exists (select from gaffer.job_spec where job = p_job and spec_hash = p_spec_hash) then
        return;
    end if;
    v_settled := least(greatest(v_job.first_seen_at, v_job.covered_until, v_job.skipped_until), v_now);
    select * into v_newest from gaffer.job_spec where job = p_job order by id desc limit 1;
    if v_job.spec_hash = p_spec_hash then
        base_at := greatest(v_settled, v_newest.since_at);
    elsif v_newest.registered_at > v_now - interval '1 hour' then
        base_at := greatest(v_settled, v_newest.registered_at);
    end if;
end $$;

-- Makes the job known as it is now; writes nothing when nothing changed. Returns the zone data of whoever registered
-- it before, where they were others.
--
-- `p_base` is the answer of base_of_spec, and `p_next_due_at` the first tick of this spec after it: a changed spec, or
-- changed zone data, goes by that, whatever its ticks before would have been; a tick that is due already under the old
-- one (`p_still_due_at`, whatever a pause skipped before it) stays due. `p_known` are the jobs that are registered together with this one: a new job that does the work of a
-- known one outside of them is a renamed job, which would begin anew with another watermark, and is refused unless
-- `p_as_new`.
create function gaffer.register(
    p_job text, p_spec jsonb, p_spec_hash text, p_work_hash text, p_zone_data text, p_grace interval,
    p_slots integer, p_base timestamptz, p_next_due_at timestamptz, p_still_due_at timestamptz, p_known text[],
    p_as_new boolean
) returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
    v_ahead timestamptz := v_now + interval '5 minutes';
    v_version text := concat_ws('/', p_spec_hash, p_work_hash, p_zone_data);
    v_grace interval;
    v_job gaffer.job;
    v_like text[];
begin
    -- Whoever looks at all jobs reads each one's.
    if (p_spec ? 'schedule' and jsonb_typeof(p_spec -> 'due' -> 'kind') = 'string' and p_spec -> 'bounds' ? 'timeout'
        and jsonb_typeof(p_spec -> 'alerts') = 'object') is not true then
        raise exception 'the spec of job "%" lacks what each has: schedule, due (with its kind), bounds (with a timeout), '
            'alerts', p_job using errcode = 'invalid_parameter_value';
    end if;
    if p_slots is null or p_slots not between 1 and 64 then
        raise exception 'job "%" cannot have % slots: from 1 to 64 are allowed', p_job, p_slots
            using errcode = 'invalid_parameter_value';
    end if;
    -- One that is longer would be added to each job's tick, and none could be judged.
    if p_grace is null or p_grace not between interval '0' and interval '3653 days' then
        raise exception 'the grace of job "%" cannot be %: from 0 to 3,653 days is allowed', p_job, p_grace
            using errcode = 'invalid_parameter_value';
    end if;
    -- Of months and days that take each other back, some cannot be added to a time.
    v_grace := make_interval(secs => extract(epoch from p_grace)::double precision);
    select * into v_job from gaffer.job where name = p_job;
    if not found then
        select array_agg(job) into v_like from gaffer.operator_action
         where action = 'rename' and details ->> 'from' = p_job and not p_as_new;
        if v_like is not null then
            raise exception 'job "%" was renamed to "%": deploy the code that calls it so; if this is another job: gaffer '
                'register MODULE --new %', p_job, array_to_string(v_like, '", then to "'), p_job using errcode = 'GF007';
        end if;
        select array_agg(name order by name) into v_like from gaffer.job
         where work_hash = p_work_hash and name <> all (p_known) and not p_as_new;
        if v_like is not null then
            raise exception 'job "%" does the work of job "%", known here and not defined beside it; if it was renamed: '
                'gaffer rename % %, which keeps its watermark; if it is another job: gaffer register MODULE --new %',
                p_job, array_to_string(v_like, '" and of job "'), case when cardinality(v_like) = 1 then v_like[1] else 'OLD' end,
                p_job, p_job using errcode = 'GF007';
        end if;
    elsif greatest(v_job.first_seen_at, v_job.covered_until, v_job.skipped_until, v_job.paused_at) > v_ahead then
        -- The clock ran ahead for a while: what it dated must not keep the job quiet until then.
        update gaffer.job
           set first_seen_at = least(first_seen_at, v_now),
               covered_until = case when covered_until > v_now then v_now else covered_until end,
               skipped_until = case when skipped_until > v_now then v_now else skipped_until end,
               last_success_at = case when last_success_at > v_now then v_now else last_success_at end,
               last_success_tick = case when last_success_tick > v_now then null else last_success_tick end,
               paused_at = case when paused_at > v_ahead then v_now else paused_at end,
               paused_until = case when paused_at > v_ahead then v_now + (paused_until - paused_at) else paused_until end,
               next_due_at = p_next_due_at, late_tick = null, rules_at = least(rules_at, v_now),
               paused = '{}', worked = '{}',
               failed_at = array(select least(at, v_now) from unnest(failed_at) as at),
               capped_at = array(select least(at, v_now) from unnest(capped_at) as at),
               taken_over_at = array(select least(at, v_now) from unnest(taken_over_at) as at),
               returned_at = array(select least(at, v_now) from unnest(returned_at) as at),
               due_since = case when due_since > v_now then v_now else due_since end,
               held_since = case when held_since > v_now then v_now else held_since end,
               held_by_since = case when held_by_since > v_now then v_now else held_by_since end,
               parked_at = case when parked_at > v_now then v_now else parked_at end
         where name = p_job;
        update gaffer.job_spec
           set since_at = least(since_at, v_now), registered_at = v_now, first_seen_at = least(first_seen_at, v_now)
         where job = p_job and registered_at > v_ahead;
        update gaffer.operator_action
           set details = case when gaffer.until_of(details) is null then details else details || jsonb_build_object(
                             'until', v_now + (gaffer.until_of(details) - at)) end,
               at = v_now
         where job = p_job and at > v_ahead;
    elsif v_job.spec_hash = p_spec_hash and v_job.work_hash is not distinct from p_work_hash
          and v_job.zone_data is not distinct from p_zone_data and v_job.retired_at is null then
        return null;
    end if;
    insert into gaffer.job (name, spec, spec_hash, work_hash, zone_data, version, grace, slots, first_seen_at, rules_at,
                            next_due_at)
    values (p_job, p_spec, p_spec_hash, p_work_hash, p_zone_data, v_version, v_grace, p_slots, v_now, v_now,
            p_next_due_at)
    on conflict (name) do nothing;
    update gaffer.job
       set spec = p_spec, spec_hash = p_spec_hash, work_hash = p_work_hash, zone_data = p_zone_data, grace = v_grace,
           slots = p_slots,
           rules_at = case when spec - '{due,protect}'::text[] = p_spec - '{due,protect}'::text[] then rules_at
                           else v_now end,
           version = v_version,
           version_before = case when version = v_version then version_before else version end,
           returned_at = case when version_before = v_version and version <> v_version
                              then (returned_at || v_now)[greatest(1, cardinality(returned_at) - 8):]
                              else returned_at end,
           retired_at = null,
           late_tick = case when p_next_due_at is not null and retired_at is null then late_tick end,
           next_due_at = case when p_next_due_at is null or retired_at is not null then p_next_due_at
                              when spec_hash = p_spec_hash and zone_data is not distinct from p_zone_data then next_due_at
                              when p_still_due_at <= v_now then least(p_still_due_at, p_next_due_at)
                              else p_next_due_at end
     where name = p_job;
    if v_job.retired_at is not null then
        insert into gaffer.operator_action (job, action, at, by)
        values (p_job, 'unretire', v_now, 'whoever runs its code');
    end if;
    insert into gaffer.job_spec (job, spec_hash, spec, first_seen_at, registered_at, since_at)
    select p_job, p_spec_hash, p_spec, coalesce(before.first_seen_at, v_now), v_now,
           case when v_job.name is null then v_now else p_base end
      from (select) as one
      left join lateral (select first_seen_at from gaffer.job_spec where job = p_job and spec_hash = p_spec_hash
                          order by id desc limit 1) as before on true
     where before.first_seen_at is null or v_job.spec -> 'schedule' is distinct from p_spec -> 'schedule';
    insert into gaffer.job_lease (job, slot)
    select p_job, slot from generate_series(0, p_slots - 1) as slot
    on conflict do nothing;
    -- Of a job that is known it would begin anew what has been done.
    insert into gaffer.job_watermark (job, updated_at) select p_job, v_now where v_job.name is null
    on conflict do nothing;
    return nullif(v_job.zone_data, p_zone_data);
end $$;

-- Makes a job known whose work is not in Python: it has no schedule here, and its own program starts it. Where the job
-- is known, nothing changes.
create function gaffer.register_external(p_job text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c_spec constant jsonb := '{"schedule": null, "max_late": null, "due": {"kind": "external"}, "bounds": {"timeout": "1h"},
                               "alerts": {}, "exclusion": "fence"}';
begin
    if not exists (select from gaffer.job where name = p_job) then
        perform gaffer.register(p_job, c_spec, 'external', null, null, interval '5 minutes', 1, gaffer.clock(), null,
                                null, array[p_job], true);
    end if;
end $$;

-- Nothing is left of this process of the server. One that the role may not look into counts as alive.
create function gaffer.is_gone(p_pid integer, p_began_at timestamptz) returns boolean
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select p_pid is not null and not exists (
        select from pg_catalog.pg_stat_activity
         where pid = p_pid and coalesce(backend_start = p_began_at, true))
$$;

-- Ends what still runs in this slot under another lease. True: it was a run of the job, and no redo.
create function gaffer.abandon(
    p_job text, p_slot integer, p_lease_id uuid, p_dead_until timestamptz, p_error text
) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_dead gaffer.job_runs;
    v_owed boolean := false;
begin
    for v_dead in
        update gaffer.job_runs
           set outcome = 'abandoned', ended_at = gaffer.clock(), error = left(p_error, 20000)
         where job = p_job and slot = p_slot and outcome = 'running' and lease_id is distinct from p_lease_id
        returning *
    loop
        perform gaffer.note_work(p_job, v_dead.started_at, least(v_dead.ended_at, p_dead_until));
        perform gaffer.note_parked(p_job, v_dead.parked, v_dead.ended_at);
        if v_dead.trigger <> 'redo' then
            perform gaffer.count_failure(p_job, v_dead.tick, v_dead.ended_at);
            perform gaffer.count_takeover(p_job, v_dead.ended_at);
            v_owed := true;
        end if;
    end loop;
    return v_owed;
end $$;

-- What to tell a run whose lease is lost: who took it is in the run's own record.
create function gaffer.lost_lease(p_job text, p_slot integer, p_fence bigint, p_lease_id uuid) returns text
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select format('fence %s of job "%s" is no longer current, so that nothing more of this run is committed; let it '
                  'stop, the next one does what is left. %s', p_fence, p_job,
                  coalesce((select 'This one was ' || error from gaffer.job_runs
                             where job = p_job and slot = p_slot and lease_id = p_lease_id and outcome = 'abandoned'),
                           (select format('It is the lease of slot %s of job "%s" by fence %s', slot, job, fence)
                              from gaffer.job_lease where lease_id = p_lease_id),
                           (select 'Row-level security may hide it, which no table of gaffer''s works with: alter table '
                                   'gaffer.job_lease disable row level security'
                              from pg_class where oid = 'gaffer.job_lease'::regclass and relrowsecurity),
                           'The lease was taken by another run, or by hand'))
$$;

-- How long a lease may last; see acquire for the upper end.
create function gaffer.check_ttl(p_job text, p_ttl interval) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_ttl is null or p_ttl not between interval '1 second' and interval '10 minutes' then
        raise exception 'the lease of job "%" cannot last %: between 1 second and 10 minutes is allowed', p_job, p_ttl
            using errcode = 'invalid_parameter_value';
    end if;
end $$;

-- Takes the lease if it is free. `p_lease_id` is made by the caller, one for each run: the same call again (its
-- answer was lost) returns the same grant. With `p_wait` 0 a taken lease is `busy` at once and the wish is noted
-- in `wanted_at`; the caller then asks once more with a wait, since the holder may just be ending.
--
-- A holder whose recorded connection is gone (`renew`) may be dead, or may just be about to connect again: its lease
-- can be taken only some seconds after that was seen for the first time, which is at `free_at`.
--
-- `p_tick` is the newest tick and `p_next_tick` the one after it. A run that may not work skips the ticks up to
-- `p_tick`: while the job is paused, or where that tick is older than `p_max_late`. `p_refusal`: why this run must not
-- work at all, to be recorded.
create function gaffer.acquire(
    p_job text, p_slot integer, p_lease_id uuid, p_owner text default session_user || ':' || pg_backend_pid(),
    p_ttl interval default '60 seconds', p_timeout interval default '1 hour', p_trigger text default 'command',
    p_tick timestamptz default null, p_next_tick timestamptz default null, p_dagster_run_id text default null,
    p_spec_hash text default null, p_zone_data text default null, p_wait interval default '1 second',
    p_max_late interval default null, p_redo tstzrange default null, p_despite_pause boolean default false,
    p_refusal text default null
) returns gaffer.lease_grant
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    -- A lease that lies further ahead than any may be granted was written by a clock that ran ahead.
    c_longest constant interval := '10 minutes';
    -- A living holder sees within a second that its connection is gone, and records the next one.
    c_gone constant interval := '4 seconds';
    v_lease gaffer.job_lease;
    v_job gaffer.job;
    v_run gaffer.job_runs;
    v_dead_until timestamptz;
    v_granted boolean := false;
    v_locked boolean;   -- by somebody else
    v_blocked text;
    v_grant gaffer.lease_grant;
begin
    perform gaffer.check_ttl(p_job, p_ttl);
    if p_lease_id is null or p_timeout is null or p_timeout <= interval '0' then
        raise exception 'a run of job "%" takes a lease_id (gen_random_uuid()) and a timeout of more than zero, not % and %',
            p_job, p_lease_id, p_timeout using errcode = 'invalid_parameter_value';
    end if;
    p_refusal := left(p_refusal, 20000);
    perform gaffer.raise_durability();
    perform set_config('lock_timeout',
                       ceil(extract(epoch from greatest(p_wait, interval '1 second')) * 1000)::text, true);
    -- Lock first, then look at the clock: a lease granted after a wait could otherwise be born expired.
    if p_refusal is not null then
        null;
    elsif p_wait > interval '0' then
        begin
            select * into v_lease from gaffer.job_lease where job = p_job and slot = p_slot for no key update;
        exception when lock_not_available then
            v_lease := null;
        end;
    else
        select * into v_lease from gaffer.job_lease where job = p_job and slot = p_slot
           for no key update skip locked;
    end if;
    v_locked := v_lease.job is null;

    select * into v_job from gaffer.job where name = p_job;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    if p_slot is null or p_slot not between 0 and v_job.slots - 1 then
        raise exception 'job "%" has no slot %: its slots are 0 to %', p_job, p_slot, v_job.slots - 1
            using errcode = 'invalid_parameter_value';
    end if;

    if p_refusal is not null then
        v_grant.outcome := 'failed';
    elsif v_job.paused_at is not null and not p_despite_pause
          and (v_job.paused_until is null or v_job.paused_until > gaffer.clock()) then
        v_grant.outcome := 'paused';
    elsif v_lease.lease_until <= gaffer.clock() and gaffer.clock() > p_tick + p_max_late
          and p_tick > coalesce(v_job.covered_until, v_job.first_seen_at) then
        v_grant.outcome := 'late';   -- a holder at work may still do it; then this one is busy
    elsif v_lease.job is not null then
        v_dead_until := v_lease.lease_until;
        if v_lease.lease_until > gaffer.clock() and gaffer.is_gone(v_lease.holder_pid, v_lease.holder_began_at) then
            update gaffer.job_lease set gone_at = gaffer.clock()
             where job = p_job and slot = p_slot and gone_at is null;
            v_grant.free_at := coalesce(v_lease.gone_at, gaffer.clock()) + c_gone;
        end if;
        update gaffer.job_lease
           set fence = case when lease_id = p_lease_id then fence else fence + 1 end,
               lease_id = p_lease_id, owner = p_owner, lease_until = gaffer.clock() + p_ttl,
               holder_pid = null, holder_began_at = null, gone_at = null
         where job = p_job and slot = p_slot
           and (lease_until <= gaffer.clock() or lease_until > gaffer.clock() + c_longest
                or lease_id = p_lease_id or v_grant.free_at <= gaffer.clock())
        returning * into v_lease;
        v_granted := found;
    end if;

    if not v_granted then
        v_grant.outcome := coalesce(v_grant.outcome, 'busy');
        v_grant.granted_at := gaffer.clock();
        select owner into v_grant.holder from gaffer.job_lease where job = p_job and slot = p_slot;
        if v_grant.outcome = 'busy' and v_locked and p_wait > interval '0' then
            select 'the lease is locked by ' || coalesce(string_agg(who, ', or '), 'somebody who is gone by now')
              into v_blocked from gaffer.lease_blockers(p_job, p_slot);
            v_grant.holder := concat_ws('; ', v_grant.holder, v_blocked);
        end if;
        if v_grant.outcome = 'busy' and p_wait = interval '0' then
            update gaffer.job
               set wanted_at = greatest(gaffer.clock(), wanted_at + interval '1 microsecond')
             where name = p_job;
            return v_grant;
        end if;
        insert into gaffer.job_runs (job, slot, owner, dagster_run_id, trigger, tick, spec_hash, redo, zone_data,
                                     started_at, ended_at, outcome, error)
        values (p_job, p_slot, p_owner, p_dagster_run_id, p_trigger, p_tick, coalesce(p_spec_hash, v_job.spec_hash),
                p_redo, p_zone_data, v_grant.granted_at, v_grant.granted_at, v_grant.outcome,
                coalesce(p_refusal, v_blocked))
        returning id into v_grant.run_id;
        if v_grant.outcome = 'failed' and p_redo is null then
            perform gaffer.count_failure(p_job, p_tick, v_grant.granted_at);
        elsif v_grant.outcome = 'late' then
            update gaffer.job
               set skipped_until = greatest(skipped_until, p_tick),
                   next_due_at = case when next_due_at <= p_tick then p_next_tick else next_due_at end,
                   late_tick = coalesce(late_tick, case when next_due_at <= p_tick then next_due_at end)
             where name = p_job;
        elsif v_grant.outcome = 'paused' then
            -- What was due before the pause began stays due.
            update gaffer.job set next_due_at = p_next_tick
             where name = p_job and next_due_at >= paused_at and next_due_at < p_next_tick;
        end if;
        return v_grant;
    end if;

    if p_redo is null then
        update gaffer.job set follow_up_at = null where name = p_job and follow_up_at is not null;
    end if;
    if gaffer.abandon(p_job, p_slot, p_lease_id, v_dead_until, format('found dead by the run of fence %s', v_lease.fence))
    then
        -- A redo does not do what the dead run has left.
        update gaffer.job set follow_up_at = gaffer.clock() where name = p_job and p_redo is not null;
    end if;

    v_grant.outcome := 'granted';
    v_grant.fence := v_lease.fence;
    v_grant.lease_until := v_lease.lease_until;
    v_grant.granted_at := v_lease.lease_until - p_ttl;
    select position, cluster into v_grant.position, v_grant.cluster from gaffer.job_watermark where job = p_job;
    select first_seen_at, greatest(covered_until, skipped_until), wanted_at
      into v_grant.first_seen_at, v_grant.covered_until, v_grant.wanted_at
      from gaffer.job where name = p_job;

    select * into v_run from gaffer.job_runs where lease_id = p_lease_id;
    if not found then
        insert into gaffer.job_runs (job, slot, fence, lease_id, owner, dagster_run_id, trigger, tick, spec_hash, redo,
                                     zone_data, cluster, timeline, started_at, deadline_at, outcome, watermark_from,
                                     watermark_to)
        values (p_job, p_slot, v_lease.fence, p_lease_id, p_owner, p_dagster_run_id, p_trigger, p_tick,
                coalesce(p_spec_hash, v_job.spec_hash), p_redo, p_zone_data, gaffer.cluster(), (select timeline_id from pg_catalog.pg_control_checkpoint()),
                v_grant.granted_at, v_grant.granted_at + p_timeout, 'running', v_grant.position, v_grant.position)
        returning * into v_run;
    elsif v_run.job = p_job and v_run.outcome = 'abandoned' then
        -- It is asked again for an answer that was lost, and somebody found it dead meanwhile.
        raise exception '%', gaffer.lost_lease(p_job, p_slot, v_run.fence, p_lease_id) using errcode = 'GF001';
    elsif v_run.job <> p_job or v_run.slot <> p_slot or v_run.outcome <> 'running' then
        raise exception 'the lease_id % was that of run % of slot % of job "%", which is %; make one for each run: '
            'gen_random_uuid()', p_lease_id, v_run.id, v_run.slot, v_run.job, v_run.outcome
            using errcode = 'invalid_parameter_value';
    end if;
    v_grant.run_id := v_run.id;
    v_grant.deadline_at := v_run.deadline_at;
    v_grant.batches := v_run.batches;
    return v_grant;
end $$;

-- Extends the lease. False: it is lost, stop at once.
--
-- `p_backend_pid`: the process of the server that the caller's driver was told of. Where it is the one that does this,
-- there is no pooler in between, and it ends with the holder: then it is recorded.
create function gaffer.renew(
    p_job text, p_slot integer, p_fence bigint, p_lease_id uuid, p_ttl interval default '60 seconds',
    p_backend_pid integer default null
) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform gaffer.check_ttl(p_job, p_ttl);
    perform set_config('lock_timeout', '2s', true);
    perform 1 from gaffer.job_lease
      where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id for no key update;
    update gaffer.job_lease
       set lease_until = gaffer.clock() + p_ttl, gone_at = null,
           (holder_pid, holder_began_at) = (
               select pid, backend_start from pg_catalog.pg_stat_activity
                where pid = p_backend_pid and pid = pg_backend_pid())
     where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id;
    return found;
end $$;

-- Sets what bounds a batch's transaction, for this transaction only, and marks it, so that commit_batch can tell
-- whether the batch's own code ended it.
create function gaffer.begin_batch(p_batch uuid, p_batch_timeout interval default '5 minutes') returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ms integer;
begin
    if p_batch is null or p_batch_timeout is null
       or p_batch_timeout not between interval '1 millisecond' and interval '1 day' then
        raise exception 'a batch takes a uuid and a timeout between 1 millisecond and 1 day, not % and %', p_batch,
            p_batch_timeout using errcode = 'invalid_parameter_value';
    end if;
    v_ms := ceil(extract(epoch from p_batch_timeout) * 1000);
    perform gaffer.raise_durability();
    perform set_config('gaffer.batch', p_batch::text, true),
            set_config('gaffer.seal', '', true),
            set_config('statement_timeout', v_ms::text, true),
            set_config('lock_timeout', v_ms::text, true),
            set_config('idle_in_transaction_session_timeout', v_ms::text, true),
            -- A client that was stopped while it reads is reached by none of these: the server waits to send.
            set_config('tcp_user_timeout', greatest(v_ms, 15000)::text, true);
    if current_setting('server_version_num')::integer >= 170000 then
        -- The server forgets this one after an error that is undone by a savepoint, and the others count only where
        -- they are shorter than it.
        perform set_config('transaction_timeout', (v_ms + 1)::text, true);
    end if;
end $$;

-- The last statement of a batch, sent in one message with COMMIT: no pause of the client fits between the two, and
-- a refusal here makes the server skip the COMMIT. A job whose rows carry their own state has no position: `p_to` is
-- null, `p_settled` says how its rows went (settle_items), and none may be left pending that is called done.
create function gaffer.commit_batch(
    p_job text, p_slot integer, p_fence bigint, p_lease_id uuid, p_run_id bigint, p_batch uuid,
    p_from jsonb default null, p_to jsonb default null, p_cluster text default null, p_items bigint default 0,
    p_ttl interval default '60 seconds', p_settled jsonb default null, p_still_pending bigint default 0
) returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz;
    v_deadline timestamptz;
    v_now timestamptz;
    v_parked bigint := 0;
begin
    perform gaffer.check_ttl(p_job, p_ttl);
    if p_items is null or p_items < 0 then
        raise exception 'a batch of job "%" cannot have % items', p_job, p_items
            using errcode = 'invalid_parameter_value';
    end if;
    if current_setting('gaffer.batch', true) is distinct from p_batch::text then
        raise exception 'the transaction of this batch of job "%" was ended by its own code. What it had written before '
            'a COMMIT of its own is kept, unless the table is protected, and comes again: leave the transaction to '
            'gaffer, and protect= the tables, so that nothing is kept', p_job using errcode = 'GF004';
    end if;
    perform 1 from gaffer.job_lease
      where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id for no key update;
    if not found then
        raise exception '%', gaffer.lost_lease(p_job, p_slot, p_fence, p_lease_id) using errcode = 'GF001';
    end if;
    v_now := gaffer.clock();
    update gaffer.job_lease set lease_until = v_now + p_ttl, gone_at = null
     where job = p_job and slot = p_slot
    returning lease_until into v_until;
    if p_to is not null then
        update gaffer.job_watermark
           set position = p_to, cluster = p_cluster,
               updated_at = case when position is distinct from p_to then v_now else updated_at end
         where job = p_job and position is not distinct from p_from;
        if not found and not exists (select from gaffer.job_watermark where job = p_job) then
            raise exception 'the watermark of job "%" is gone, and with it how far it has got; gaffer status % has the cure',
                p_job, p_job using errcode = 'GF006';
        elsif not found then
            raise exception 'the watermark of job "%" is not where this batch found it', p_job using errcode = 'GF005';
        end if;
    end if;
    if p_still_pending > 0 then
        raise exception '% rows of a batch of job "%" are still pending after what done= sets: they would be done '
            'again and again; let done= end what pending= says, and no trigger keep it from that', p_still_pending, p_job using errcode = 'GF009';
    end if;
    if p_settled is not null then
        v_parked := gaffer.settle_items(p_job, p_settled, v_now);
    end if;
    update gaffer.job_runs
       set batches = batches + 1, items = items + p_items, parked = parked + v_parked,
           watermark_to = coalesce(p_to, watermark_to)
     where id = p_run_id and lease_id = p_lease_id and outcome = 'running'
    returning deadline_at into v_deadline;
    if not found then
        raise exception 'run % of job "%" is not running under this lease', p_run_id, p_job using errcode = 'GF001';
    end if;
    if v_now > v_deadline then
        raise exception 'run % of job "%" is past its deadline of %', p_run_id, p_job, v_deadline
            using errcode = 'GF003';
    end if;
    if pg_my_temp_schema() <> 0 then
        -- The next batch, or whoever is next through a pooler, would find the rows of this one.
        execute 'close all';
        discard temp;
    end if;
    perform gaffer.raise_durability();  -- the batch's own code may have lowered it
    perform set_config('gaffer.seal', pg_current_xact_id()::text || ':' || p_job, true);
    return v_until;
end $$;

-- After a COMMIT whose answer was lost: takes the next fence under a new lease id, which waits for whatever still
-- holds the lease row. From then on the old transaction is either committed and counted in `batches`, or can never
-- commit. The same call again returns the same grant.
create function gaffer.supersede(
    p_job text, p_slot integer, p_fence bigint, p_lease_id uuid, p_run_id bigint, p_new_lease_id uuid,
    p_ttl interval default '60 seconds'
) returns gaffer.lease_grant
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_lease gaffer.job_lease;
    v_run gaffer.job_runs;
    v_grant gaffer.lease_grant;
begin
    perform gaffer.check_ttl(p_job, p_ttl);
    perform gaffer.raise_durability();
    select * into v_lease from gaffer.job_lease where job = p_job and slot = p_slot for no key update;
    if v_lease.lease_id = p_new_lease_id and v_lease.fence = p_fence + 1 then
        null;   -- done by an earlier call
    elsif v_lease.fence = p_fence and v_lease.lease_id = p_lease_id then
        update gaffer.job_lease
           set fence = fence + 1, lease_id = p_new_lease_id, lease_until = gaffer.clock() + p_ttl, gone_at = null
         where job = p_job and slot = p_slot
        returning * into v_lease;
        update gaffer.job_runs set fence = v_lease.fence, lease_id = p_new_lease_id
         where id = p_run_id and lease_id = p_lease_id and outcome = 'running';
    else
        raise exception '%', gaffer.lost_lease(p_job, p_slot, p_fence, p_lease_id) using errcode = 'GF001';
    end if;
    select * into v_run from gaffer.job_runs
     where id = p_run_id and lease_id = p_new_lease_id and outcome = 'running';
    if not found then
        raise exception 'run % of job "%" is not running under this lease', p_run_id, p_job using errcode = 'GF001';
    end if;
    v_grant.outcome := 'granted';
    v_grant.run_id := v_run.id;
    v_grant.fence := v_lease.fence;
    v_grant.lease_until := v_lease.lease_until;
    v_grant.granted_at := gaffer.clock();
    v_grant.deadline_at := v_run.deadline_at;
    v_grant.batches := v_run.batches;
    select position, cluster into v_grant.position, v_grant.cluster from gaffer.job_watermark where job = p_job;
    return v_grant;
end $$;

-- Ends the run, counts it on the job and frees the lease, if the fence is current. A run that would end `succeeded`
-- or `partial` is told to look again (`wanted`) when a wake-up came since `p_wanted_at` was read: that wake-up went
-- away because of us; where the run ends otherwise, it is to be followed by another. `p_covered_until`: ticks up to
-- there are covered, and `p_next_due_at` is the tick after it; null: none is. `p_follow_up_at`: when the next run is
-- wanted without waiting for a tick. `p_oldest_due_at`: since when the oldest of what is left has been due, where that can be told;
-- `p_held_by`: whose open transaction keeps something from being due (`who`, `xid`, `cure`). `p_batches`: so many were
-- acknowledged to this run; where a fail-over has lost some of them it has not done all that it knows of, and must not
-- end as if it had. A redo leaves the job as it is. Repeating the call is safe.
create function gaffer.end_run(
    p_job text, p_slot integer, p_fence bigint, p_lease_id uuid, p_run_id bigint, p_outcome text default 'succeeded',
    p_wanted_at timestamptz default null, p_covered_until timestamptz default null,
    p_success_tick timestamptz default null, p_ticks_covered integer default null, p_backlog bigint default null,
    p_next_run_at timestamptz default null, p_next_due_at timestamptz default null,
    p_follow_up_at timestamptz default null, p_oldest_due_at timestamptz default null, p_held_by jsonb default null,
    p_sqlstate text default null, p_error text default null, p_batches integer default null
) returns gaffer.run_ending
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz;
    v_run gaffer.job_runs;
    v_job gaffer.job;
    v_ending gaffer.run_ending;
    v_done boolean := p_outcome in ('succeeded', 'partial');
    v_held_by_since timestamptz;
    v_renamed boolean;
    v_lease gaffer.job_lease;
begin
    if p_outcome is null or p_outcome not in
       ('succeeded', 'partial', 'capped', 'interrupted', 'failed', 'timed_out', 'lost_lease') then
        raise exception 'a run of job "%" cannot end as %', p_job, p_outcome
            using errcode = 'invalid_parameter_value';
    end if;
    if not gaffer.is_holder(p_held_by) then
        raise exception 'the p_held_by of a run of job "%" is an object with a text who, and xid and cure that are texts or '
            'left out, of 20,000 characters at most; not %', p_job, left(p_held_by::text, 200)
            using errcode = 'invalid_parameter_value';
    end if;
    p_error := left(p_error, 20000);
    perform gaffer.raise_durability();
    perform 1 from gaffer.job_lease
      where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id for no key update;
    if not found then
        select * into v_run from gaffer.job_runs where id = p_run_id and lease_id = p_lease_id;
        if not found then
            raise exception 'run % of job "%" is not under this lease', p_run_id, p_job using errcode = 'GF006';
        end if;
        v_renamed := v_run.job is distinct from p_job and exists (
            select from gaffer.operator_action
             where action = 'rename' and job = v_run.job and details ->> 'from' = p_job);
        select * into v_lease from gaffer.job_lease
         where job = v_run.job and slot = v_run.slot and lease_id = p_lease_id for no key update;
        -- A run that has its lease is at work, whatever name or number its caller has mixed up.
        if p_slot is distinct from v_run.slot or (v_run.job is distinct from p_job and not v_renamed)
           or (v_lease.job is not null and (not v_renamed or v_lease.fence is distinct from p_fence)) then
            raise exception 'run % is of slot % of job "%"%, not of slot % of job "%" by fence %; nothing was changed, end '
                'it as what it is', p_run_id, v_run.slot, v_run.job, coalesce(' by fence ' || v_lease.fence, ''), p_slot, p_job,
                p_fence using errcode = 'GF006';
        end if;
        if v_lease.job is not null then  -- it ran out, and then the job was renamed
            update gaffer.job_lease
               set lease_id = null, lease_until = 'epoch', holder_pid = null, holder_began_at = null, gone_at = null
             where job = v_run.job and slot = v_run.slot;
        end if;
        select * into v_run from gaffer.job_runs where id = p_run_id for update;
        if v_run.outcome = 'running' and v_run.trigger <> 'redo' then
            -- The lease was taken away by hand, and nobody has found this run dead yet.
            perform gaffer.count_failure(v_run.job, v_run.tick, gaffer.clock());
            perform gaffer.note_work(v_run.job, v_run.started_at, gaffer.clock());
            perform gaffer.note_parked(v_run.job, v_run.parked, gaffer.clock());
            perform gaffer.count_takeover(v_run.job, gaffer.clock());
        end if;
        if v_run.outcome in ('abandoned', 'running') then
            update gaffer.job_runs
               set outcome = 'lost_lease', ended_at = coalesce(ended_at, gaffer.clock()), sqlstate = p_sqlstate,
                   error = case when strpos(p_error, error) > 0 then p_error
                                else left(nullif(concat_ws('; ', p_error, error), ''), 20000) end
             where id = p_run_id;
        end if;
        v_ending.result := case when v_run.outcome in ('abandoned', 'running', 'lost_lease') then 'lost_lease'
                                else 'ended' end;
        return v_ending;
    end if;

    select * into v_job from gaffer.job where name = p_job for no key update;
    select * into v_run from gaffer.job_runs
     where id = p_run_id and lease_id = p_lease_id and outcome = 'running' for update;
    if not found then
        raise exception 'run % of job "%" is not running under this lease', p_run_id, p_job using errcode = 'GF006';
    end if;
    if v_done and v_run.batches < p_batches then
        raise exception 'run % of job "%" had committed its batches up to number %, and the database has % of them: it was '
            'set back (a fail-over, a restore); the next run does them again', p_run_id, p_job, p_batches, v_run.batches
            using errcode = 'GF005';
    end if;
    if v_run.batches < p_batches then  -- what it remembers to have covered, the database has not
        p_covered_until := null;
        p_ticks_covered := null;
    end if;
    if v_done and v_run.trigger <> 'redo' and v_job.wanted_at is distinct from p_wanted_at then
        v_ending.result := 'wanted';
        v_ending.wanted_at := v_job.wanted_at;
        return v_ending;
    end if;

    v_now := gaffer.clock();
    v_held_by_since := case
        when coalesce(p_held_by ->> 'xid', p_held_by ->> 'who') = coalesce(v_job.held_by ->> 'xid', v_job.held_by ->> 'who')
        then v_job.held_by_since
        when p_held_by is not null then v_now end;
    update gaffer.job_runs
       set outcome = p_outcome, ended_at = v_now, held_by = p_held_by, held_by_since = v_held_by_since, covered_until = p_covered_until, ticks_covered = p_ticks_covered,
           backlog = p_backlog, next_run_at = p_next_run_at, sqlstate = p_sqlstate, error = p_error
     where id = p_run_id;
    if v_run.trigger <> 'redo' then
        if p_outcome in ('succeeded', 'partial', 'capped') then
            update gaffer.job
               set consecutive_failures = 0, failed_ticks = '{}', failed_at = '{}', vanished_at = null,
                   last_success_at = case when v_done then v_now else last_success_at end,
                   last_success_tick = case when v_done then p_success_tick else last_success_tick end,
                   consecutive_capped = case when v_done then 0 else consecutive_capped + 1 end,
                   capped_at = case when v_done then '{}'
                                    when cardinality(capped_at) < 100 then capped_at || v_now
                                    else capped_at end,
                   due_since = case when not v_done then coalesce(p_oldest_due_at, due_since, v_run.started_at) end,
                   held_since = case when p_held_by is not null then coalesce(held_since, v_run.started_at) end,
                   held_by = p_held_by, held_by_since = v_held_by_since
             where name = p_job;
        elsif p_outcome <> 'interrupted' then
            perform gaffer.count_failure(p_job, v_run.tick, v_now);
        end if;
        -- Of ticks that were skipped as late, those that it did not reach are still missed.
        update gaffer.job
           set covered_until = p_covered_until,
               next_due_at = case when p_next_due_at <= skipped_until then next_due_at else p_next_due_at end,
               late_tick = case when p_next_due_at <= skipped_until then p_next_due_at end
         where name = p_job and p_covered_until > coalesce(covered_until, '-infinity');
    end if;
    perform gaffer.note_work(p_job, v_run.started_at, v_now);
    perform gaffer.note_parked(p_job, v_run.parked, v_now);
    update gaffer.job
       set runs_ended = runs_ended + 1, run_seconds = run_seconds + extract(epoch from v_now - v_run.started_at),
           follow_up_at = case when wanted_at is distinct from p_wanted_at then v_now
                               when v_run.trigger = 'redo' then follow_up_at
                               when v_job.slots > 1 then least(follow_up_at, p_follow_up_at)  -- another slot's wish
                               else p_follow_up_at end
     where name = p_job;
    -- Late renewals and commits of this run find nothing: the id is gone, the fence stays.
    update gaffer.job_lease
       set lease_id = null, lease_until = 'epoch', holder_pid = null, holder_began_at = null, gone_at = null
     where job = p_job and slot = p_slot;
    v_ending.result := 'ended';
    return v_ending;
end $$;

-- Keeps the column that `NewRows` reads in the order of: the number of the transaction that wrote the row. Whatever
-- is given is overwritten, also by COPY and replication (the trigger is ENABLE ALWAYS). Its arguments: `new` or
-- `changed`, then the keys that `NewRows` reads the table by.
create function gaffer.stamp_xid() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if tg_op = 'INSERT' or tg_argv[0] = 'changed' then
        new.gaffer_xid := pg_catalog.pg_current_xact_id();
        return new;
    end if;
    new.gaffer_xid := old.gaffer_xid;
    for i in 1 .. tg_nargs - 1 loop
        -- With another key it is another row, and may have moved behind the reader.
        if to_jsonb(new) -> tg_argv[i] is distinct from to_jsonb(old) -> tg_argv[i] then
            new.gaffer_xid := pg_catalog.pg_current_xact_id();
        end if;
    end loop;
    return new;
end $$;
