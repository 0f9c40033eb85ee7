-- What Prometheus, Grafana and other readers see: one row for each job, open incident, watch and receiver.
--
-- From counters, and from short looks into indexes, whatever the history. What a reader's role needs: USAGE on the
-- schema gaffer, SELECT on these views, and EXECUTE on gaffer.clock().

create view gaffer.job_status as
with clock as materialized (select gaffer.clock() as now)
select j.name,
       j.spec -> 'schedule' ->> 'timezone' as timezone,
       j.paused_at is not null and (j.paused_until is null or j.paused_until > clock.now) as paused,
       coalesce(j.muted_until > clock.now, false) as muted,
       j.retired_at is not null as retired,
       j.first_seen_at,
       j.last_success_at,
       extract(epoch from clock.now - j.last_success_at)::double precision as last_success_age_seconds,
       case when tick.at <= clock.now then tick.at end as due_since,
       extract(epoch from j.grace)::double precision as grace_seconds,
       told.backlog,
       j.due_since as backlog_since,
       j.consecutive_failures,
       j.consecutive_capped,
       j.parked,
       lease.holder,
       lease.lease_until,
       lease.fence,
       j.leases_lost,
       j.runs_ended,
       j.run_seconds
  from clock
 cross join gaffer.job j
 cross join lateral (
       select case when j.retired_at is not null then null
                   when j.late_tick is not null then j.late_tick
                   when j.paused_at <= j.next_due_at and (j.paused_until is null or j.next_due_at < j.paused_until)
                   then null
                   else j.next_due_at end as at) tick
 cross join lateral (
       select max(l.fence) as fence,
              string_agg(l.owner, ', ' order by l.slot) filter (where l.lease_until > clock.now) as holder,
              max(l.lease_until) filter (where l.lease_until > clock.now) as lease_until
         from gaffer.job_lease l
        where l.job = j.name) lease
  left join lateral (
       select newest.backlog
         from (select r.id, r.backlog, r.trigger from gaffer.job_runs r
                where r.job = j.name order by r.id desc limit 100) newest
        where newest.backlog is not null and newest.trigger <> 'redo'
        order by newest.id desc limit 1) told on true;

comment on view gaffer.job_status is 'One row for each job.';
comment on column gaffer.job_status.timezone is 'Of its schedule; null: it has none.';
comment on column gaffer.job_status.due_since is
    'The earliest tick that a success is waited for, if it is past; null: nothing is due, or what is due is the first '
    'tick after a pause that ran out, which no run has looked at since (only the schedule can tell it).';
comment on column gaffer.job_status.grace_seconds is
    'How late a success may come after its tick. It stands still in a pause, and a run at work may take longer: '
    'gaffer check and gaffer metrics apply the whole rule.';
comment on column gaffer.job_status.backlog is
    'What was due and left, as the newest of its last hundred runs that could tell said; null: none could.';
comment on column gaffer.job_status.backlog_since is
    'Since when something due has been left, as far as runs know; null: nothing is.';
comment on column gaffer.job_status.consecutive_failures is 'Ticks in a row whose runs failed.';
comment on column gaffer.job_status.consecutive_capped is
    'Runs in a row that stopped at their bounds, with something left.';
comment on column gaffer.job_status.parked is 'Rows that were given up.';
comment on column gaffer.job_status.holder is 'Who is at work; null: nobody.';
comment on column gaffer.job_status.lease_until is 'How long the holder''s lease lasts if it is not renewed.';
comment on column gaffer.job_status.fence is 'Of the newest lease; only grows.';
comment on column gaffer.job_status.leases_lost is 'Runs that were found dead, or whose lease was taken from them.';
comment on column gaffer.job_status.runs_ended is 'Runs that ended by themselves, whatever their outcome.';
comment on column gaffer.job_status.run_seconds is 'How long those took together.';

create view gaffer.open_alert as
with clock as materialized (select gaffer.clock() as now)
select a.id, a.key, a.job, a.watch, a.kind, a.severity,
       a.since_at as since,
       extract(epoch from clock.now - a.since_at)::double precision as age_seconds,
       a.opened_at,
       a.acked_at is not null as acked,
       coalesce(j.muted_until > clock.now, false) as muted
  from clock
 cross join gaffer.alert a
  left join gaffer.job j on j.name = a.job
 where a.resolved_at is null;

comment on view gaffer.open_alert is 'One row for each incident that is open, of a job or of a watch.';
comment on column gaffer.open_alert.since is 'When it became true; when that was seen is opened_at.';
comment on column gaffer.open_alert.acked is 'Somebody knows of it.';
comment on column gaffer.open_alert.muted is 'Nothing is sent of the job''s incidents at present.';

create view gaffer.watch_status as
select w.name, w.first_seen_at, w.last_pass_at,
       extract(epoch from gaffer.clock() - w.last_pass_at)::double precision as last_pass_age_seconds,
       extract(epoch from w.every)::double precision as interval_seconds,
       w.passes,
       cardinality(w.jobs) as jobs
  from gaffer.watch w;

comment on view gaffer.watch_status is 'One row for each of those who look for what is wrong with jobs.';
comment on column gaffer.watch_status.interval_seconds is 'How often it means to look; null: it does not say.';
comment on column gaffer.watch_status.jobs is 'How many are defined where it looks.';

create view gaffer.delivery_status as
with clock as materialized (select gaffer.clock() as now)
select r.name, r.last_seen_at, left_over.waiting, left_over.waiting_since, r.failing_since,
       extract(epoch from clock.now - r.failing_since)::double precision as failing_seconds
  from clock
 cross join gaffer.receiver r
 cross join lateral (
       select count(*) as waiting, min(d.created_at) as waiting_since
         from gaffer.alert_delivery d
        where d.receiver = r.name and d.delivered_at is null and d.dropped_at is null) left_over;

comment on view gaffer.delivery_status is 'One row for each receiver of notices.';
comment on column gaffer.delivery_status.last_seen_at is 'When somebody last had a look at what is to be sent to it.';
comment on column gaffer.delivery_status.waiting is 'Notices that it has not taken yet, with those that a mute holds back.';
comment on column gaffer.delivery_status.waiting_since is 'When the oldest of those was written.';
comment on column gaffer.delivery_status.failing_since is 'Since when it has taken none; null: the last one was taken.';
