-- Old history is removed by `gaffer prune`: runs that ended, and incidents that are over, with their notices. Nothing is
-- written for what is not there any more but gaffer.job.pruned_until: the ledger of ticks, and what is learnt of runs
-- that could not write, is exact after it, and says nothing of the time before.
--
-- Each call is a short transaction of its own, and takes no row that somebody has locked. Whoever is killed in between
-- leaves nothing half done; the next one goes on.

-- The runs of a job that nothing needs any more, those first that ended first, and up to where each says something of
-- ticks. What stays: the newest hundred (gaffer.job_status looks at them); in each slot the newest that worked and was no
-- redo, which the next run asks how it ended, and `gaffer status` shows; and whatever began, ended or covered a tick
-- since `p_before`, or since the oldest incident became true that is open.
create function gaffer.prunable_runs(
    p_job text, p_before timestamptz, p_after_at timestamptz default '-infinity', p_after bigint default 0,
    p_limit bigint default null
) returns table (id bigint, ended_at timestamptz, until timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c_newest constant integer := 100;
    v_before constant timestamptz := least(p_before, (
        select min(a.since_at) from gaffer.alert a where a.resolved_at is null and (a.job = p_job or a.watch is not null)));
    v_kept bigint[];
begin
    select coalesce(array_agg(newest.id), '{}') into v_kept
      from gaffer.job_lease l
     cross join lateral (
           select r.id from gaffer.job_runs r
            where r.job = p_job and r.slot = l.slot and r.outcome not in ('busy', 'paused', 'late')
              and r.trigger <> 'redo'
            order by r.id desc limit 1) newest
     where l.job = p_job;
    return query
        select r.id, r.ended_at, told.until
          from gaffer.job_runs r
         cross join lateral (
               select greatest(r.started_at, r.covered_until, gaffer.until_of(r.watermark_to),
                               case when r.outcome = 'late' then r.tick end) as until) told
         where r.job = p_job and (r.ended_at, r.id) > (p_after_at, p_after) and r.ended_at < v_before
           and told.until < v_before and r.outcome <> 'running' and r.id <> all (v_kept)
           and r.id < (select n.id from gaffer.job_runs n
                        where n.job = p_job order by n.id desc offset c_newest - 1 limit 1)
         order by r.ended_at, r.id
         limit p_limit;
end $$;

-- The incidents that were over before `p_before`, and of which every notice was taken, or dropped.
create function gaffer.prunable_alerts(p_before timestamptz) returns setof bigint
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select a.id from gaffer.alert a
     where a.resolved_at < p_before
       and not exists (select from gaffer.alert_delivery d
                        where d.alert = a.id and d.delivered_at is null and d.dropped_at is null)
     order by a.resolved_at, a.id
$$;

-- The row that tells of it, in which each step adds what it removed.
create function gaffer.begin_prune(p_before timestamptz, p_by text, p_reason text) returns bigint
language sql security definer
set search_path = pg_catalog, pg_temp
as $$
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (null, 'prune', gaffer.clock(), p_by, p_reason,
            jsonb_build_object('before', p_before, 'runs', 0, 'alerts', 0, 'deliveries', 0))
    returning id
$$;

-- History is removed under a row that tells of it: of the role that does it, and up to the same time.
create function gaffer.check_prune(p_action bigint, p_before timestamptz) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from gaffer.operator_action
      where id = p_action and action = 'prune' and role = session_user
        and (details ->> 'before')::timestamptz = p_before;
    if not found then
        raise exception 'action % is no prune of % that % has begun: select gaffer.begin_prune(before, by, reason), whose '
            'answer goes with the same time into each step', coalesce(p_action::text, 'null'),
            coalesce(p_before::text, 'null'), session_user using errcode = 'invalid_parameter_value';
    end if;
end $$;

create function gaffer.note_pruned(p_action bigint, p_what text, p_rows bigint) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.operator_action
       set details = details || jsonb_build_object(p_what, (details ->> p_what)::bigint + p_rows)
     where id = p_action and action = 'prune'
$$;

-- Removes up to so many runs of a job, from those after `p_after_at` and `p_after` on. `last_at` and `last`: go into the
-- next call; null: that was all.
create function gaffer.prune_runs(
    p_action bigint, p_job text, p_before timestamptz, p_after_at timestamptz, p_after bigint, p_limit integer,
    out removed bigint, out last_at timestamptz, out last bigint
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_runs bigint[];
    v_until timestamptz;
begin
    perform gaffer.check_prune(p_action, p_before);
    select array_agg(id order by ended_at, id), max(until), max(ended_at) into v_runs, v_until, last_at
      from gaffer.prunable_runs(p_job, p_before, p_after_at, p_after, p_limit);
    removed := 0;
    if v_runs is null then
        return;
    end if;
    last := v_runs[cardinality(v_runs)];
    update gaffer.job set pruned_until = greatest(pruned_until, v_until) where name = p_job;
    v_runs := array(
        select id from gaffer.job_runs where id = any (v_runs) and outcome <> 'running' for update skip locked);
    delete from gaffer.job_runs where id = any (v_runs);
    get diagnostics removed = row_count;
    perform gaffer.note_pruned(p_action, 'runs', removed);
end $$;

-- Removes up to so many incidents, with their notices; how many of each. No incident: that was all.
create function gaffer.prune_alerts(
    p_action bigint, p_before timestamptz, p_limit integer, out alerts bigint, out deliveries bigint
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_alerts bigint[];
begin
    perform gaffer.check_prune(p_action, p_before);
    select array_agg(id) into v_alerts from (
        select id from gaffer.alert
         where id in (select gaffer.prunable_alerts(p_before) limit p_limit) for update skip locked) locked;
    -- A notice may have been made meanwhile; none can from here on, since it refers to the incident.
    v_alerts := array(select each from unnest(v_alerts) each
                       where not exists (select from gaffer.alert_delivery d
                                          where d.alert = each and d.delivered_at is null and d.dropped_at is null));
    delete from gaffer.alert_delivery where alert = any (v_alerts);
    get diagnostics deliveries = row_count;
    delete from gaffer.alert where id = any (v_alerts);
    get diagnostics alerts = row_count;
    if alerts > 0 then
        perform gaffer.note_pruned(p_action, 'alerts', alerts);
        perform gaffer.note_pruned(p_action, 'deliveries', deliveries);
    end if;
end $$;
