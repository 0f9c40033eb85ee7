-- Runs that could not write: a launch that failed, a worker that was killed before its first word, a run that nobody
-- ever began. Whoever started them recorded them, and Dagster's sensor tells of them here, with gaffer.learn_run. Runs
-- that ended well here, and could not say so there, are told the other way: gaffer.note_reports.

alter table gaffer.job_runs add column reported_at timestamptz;

comment on column gaffer.job_runs.reported_at is
    'When the sensor reported the run, which died before it could do so itself; or found that it had.';

create index job_runs_of_dagster on gaffer.job_runs (dagster_run_id);

-- Records a run of which gaffer.job_runs has nothing, as `failed`, and counts it. Recorded, and not counted, is one
-- that began in a pause; that ended in a stretch in which nobody looked, since the database was away then, most likely;
-- that ended before a success; or whose tick has been counted. After an outage the next run is wanted at once. Null: it
-- is known, was none of the job's, or is so old that its row may have been removed.
create function gaffer.learn_run(
    p_job text, p_dagster_run_id text, p_trigger text, p_tick timestamptz, p_started_at timestamptz,
    p_ended_at timestamptz, p_spec_hash text, p_error text
) returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    -- A daemon that has much to do looks now and then; that excuses no failure.
    c_outage constant interval := '5 minutes';
    v_now timestamptz := gaffer.clock();
    v_ended_at timestamptz := least(p_ended_at, v_now);
    v_started_at timestamptz := least(p_started_at, v_ended_at);
    v_last_pass timestamptz;
    v_job gaffer.job;
begin
    perform gaffer.raise_durability();
    -- Whoever learns of it at the same time waits here, and then finds it known.
    select * into v_job from gaffer.job where name = p_job for no key update;
    if not found or v_ended_at < v_job.first_seen_at or v_started_at <= v_job.pruned_until
       or exists (select from gaffer.job_runs where job = p_job and dagster_run_id = p_dagster_run_id) then
        return null;
    end if;
    insert into gaffer.job_runs (job, slot, owner, dagster_run_id, trigger, tick, spec_hash, started_at, ended_at,
                                 outcome, error)
    values (p_job, 0, 'dagster', p_dagster_run_id, p_trigger, p_tick, p_spec_hash, v_started_at, v_ended_at,
            'failed', left(p_error, 20000));
    select max(last_pass_at) into v_last_pass from gaffer.watch;
    if v_ended_at <= greatest(v_job.last_success_at, v_job.capped_at[cardinality(v_job.capped_at)])
       or (v_job.paused_at <= v_started_at and (v_job.paused_until is null or v_job.paused_until > v_started_at)) then
        return 'recorded';
    elsif exists (select from gaffer.watch_gap
                   where since_at <= v_ended_at and v_ended_at < until_at and until_at > since_at + c_outage)
          -- The gap that the next pass will note.
          or (v_last_pass <= v_ended_at and v_last_pass < v_now - c_outage) then
        -- What it was to do does not wait for the next tick.
        update gaffer.job set follow_up_at = coalesce(follow_up_at, v_now) where name = p_job and next_due_at <= v_now;
        return 'recorded';
    elsif p_tick = any (v_job.failed_ticks) then
        return 'recorded';
    end if;
    perform gaffer.count_failure(p_job, p_tick, v_ended_at);
    -- It may be learnt after runs of later ticks, which counted.
    update gaffer.job set failed_at = array(select at from unnest(failed_at) as at order by at) where name = p_job;
    return 'counted';
end $$;

-- What a watch's orchestrator recorded is known up to then.
create function gaffer.note_learnt(p_watch text, p_until timestamptz) returns void
language sql security definer
set search_path = pg_catalog, pg_temp
as 'update gaffer.watch set learnt_until = p_until where name = p_watch';

-- Returns which of these runs nobody has reported yet; the caller does.
create function gaffer.note_reports(p_runs bigint[]) returns setof bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform gaffer.raise_durability();
    return query
        update gaffer.job_runs set reported_at = gaffer.clock()
         where id = any (p_runs) and reported_at is null
        returning id;
end $$;
