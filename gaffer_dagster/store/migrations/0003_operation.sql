-- What people do to a job. Each is one transaction with its row in gaffer.operator_action.

-- For what is not done by a function of its own: a definition that is registered, a table that is prepared. What rules
-- are read from (a pause, a mute, a name that a job had) is written by the function that does it, and by no other.
create function gaffer.note_operation(
    p_job text, p_action text, p_by text, p_reason text, p_details jsonb default '{}'
) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_action is null
       or p_action <> all (array['migrate', 'pool', 'prepare', 'redo', 'register', 'roles', 'test receivers']) then
        raise exception 'the action % is noted by the function that does it', p_action
            using errcode = 'invalid_parameter_value';
    end if;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, p_action, gaffer.clock(), p_by, p_reason, p_details);
end $$;

-- The pause of this job, which is over or ends now, may have delayed the tick that is waited for.
create function gaffer.note_pause(p_job text, p_now timestamptz) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job
       set paused = (paused || tstzrange(paused_at, least(p_now, paused_until)))[greatest(1, cardinality(paused) - 98):]
     where name = p_job and paused_at < least(p_now, paused_until)
       and coalesce(late_tick, next_due_at) < least(p_now, paused_until)
$$;

-- From now until `p_until` (null: until it is resumed) runs end `paused` and their ticks are skipped. A pause of a job
-- that is paused takes the place of the one before, after which `p_next_tick` is the first tick.
create function gaffer.pause(
    p_job text, p_until timestamptz, p_next_tick timestamptz, p_by text, p_reason text
) returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
begin
    perform gaffer.note_pause(p_job, v_now);
    update gaffer.job
       set paused_at = v_now, paused_until = p_until, paused_by = p_by, pause_reason = p_reason,
           next_due_at = case when next_due_at >= paused_at and next_due_at < least(v_now, paused_until)
                              then p_next_tick else next_due_at end,
           late_tick = case when late_tick >= paused_at and late_tick < least(v_now, paused_until)
                            then case when p_next_tick <= skipped_until then p_next_tick end else late_tick end
     where name = p_job;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, 'pause', v_now, p_by, p_reason, jsonb_build_object('until', p_until));
    return v_now;
end $$;

-- Ends a pause, of which `p_next_tick` is the first tick after: those within are skipped. False: it was not paused.
create function gaffer.resume(p_job text, p_next_tick timestamptz, p_by text, p_reason text) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
    v_job gaffer.job;
begin
    select * into v_job from gaffer.job where name = p_job for no key update;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    if v_job.paused_at is null then
        return false;
    end if;
    perform gaffer.note_pause(p_job, v_now);
    update gaffer.job
       set paused_at = null, paused_until = null, paused_by = null, pause_reason = null,
           next_due_at = case when next_due_at >= v_job.paused_at
                                   and next_due_at < least(v_now, v_job.paused_until)
                              then p_next_tick else next_due_at end,
           late_tick = case when late_tick >= v_job.paused_at and late_tick < least(v_now, v_job.paused_until)
                            then case when p_next_tick <= skipped_until then p_next_tick end else late_tick end
     where name = p_job;
    insert into gaffer.operator_action (job, action, at, by, reason) values (p_job, 'resume', v_now, p_by, p_reason);
    return true;
end $$;

-- Locks a job's leases, or the one of this slot. Raises where it is not known, or somebody else keeps one locked.
create function gaffer.lock_leases(p_job text, p_slot integer default null) returns setof gaffer.job_lease
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    v_slot integer;
    v_who text;
    v_cure text;
begin
    perform 1 from gaffer.job where name = p_job;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    for v_slot in
        select slot from gaffer.job_lease where job = p_job and (p_slot is null or slot = p_slot) order by slot
    loop
        return query select * from gaffer.job_lease where job = p_job and slot = v_slot for no key update;
    end loop;
    if v_slot is null then
        raise exception 'job "%" has no slot %; it has those up to %', p_job, p_slot,
            (select max(slot) from gaffer.job_lease where job = p_job) using errcode = 'GF006';
    end if;
exception when lock_not_available then
    select string_agg(who, ', or '), string_agg(cure, '; or ') into v_who, v_cure
      from gaffer.lease_blockers(p_job, v_slot);
    raise exception 'the lease of job "%" is locked by %, so that nothing was changed; end that transaction and try '
        'again%', p_job, coalesce(v_who, 'somebody who is gone by now'), coalesce(': ' || v_cure, '')
        using errcode = 'GF008';
end $$;

-- Locks a job's leases. Raises where it is not known, or somebody is at work.
create function gaffer.keep_idle(p_job text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_lease gaffer.job_lease;
begin
    for v_lease in select * from gaffer.lock_leases(p_job) loop
        if v_lease.lease_id is not null and v_lease.lease_until > gaffer.clock() then
            raise exception 'job "%" is at work (%): wait until that run has ended, or stop it (gaffer release)',
                p_job, v_lease.owner using errcode = 'GF008';
        end if;
    end loop;
end $$;

-- Gives a job another name, with its watermark, fence and history. Nobody may be at work meanwhile.
create function gaffer.rename(p_old text, p_new text, p_by text, p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform gaffer.keep_idle(p_old);
    update gaffer.job set name = p_new where name = p_old;
    update gaffer.protected_table set jobs = array_replace(jobs, p_old, p_new) where p_old = any (jobs);
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_new, 'rename', gaffer.clock(), p_by, p_reason, jsonb_build_object('from', p_old));
end $$;
