#!/bin/sh
# Runs a file of SQL as one fenced batch of a job:  GAFFER_DATABASE_URL=… fenced.sh JOB FILE.sql
#
# The file's statements are in a transaction already; it must not end it. Exit code 0: done, or somebody else is at it
# (the outcome is printed); else what psql says: 3 for an error in SQL. See docs/sql.md.
set -eu
job=$1 file=$2
run() { psql -X -q -t -A -v ON_ERROR_STOP=1 -v job="$job" -v lease_id="$lease_id" -v file="$file" "$@" "$GAFFER_DATABASE_URL"; }
lease_id=$(psql -X -q -t -A -c 'select gen_random_uuid()' "$GAFFER_DATABASE_URL")

run <<'SQL' || {
select from gaffer.register_external(:'job');
-- There is no keeper here: the lease is as long as one may be.
select outcome, run_id, fence, coalesce(wanted_at::text, '') as wanted_at, outcome <> 'granted' as is_refused
  from gaffer.acquire(:'job', 0, :'lease_id', p_ttl => '10 minutes') \gset
\if :is_refused
    \echo :outcome
    \quit
\endif

begin;
select from gaffer.begin_batch(:'lease_id', '5 minutes');
\i :file
\set ON_ERROR_STOP on
-- \; sends both as one message: no pause fits between the check and the COMMIT.
select from gaffer.commit_batch(:'job', 0, :fence, :'lease_id', :run_id, :'lease_id') \; commit;

select result = 'wanted' as is_wanted from gaffer.end_run(
    :'job', 0, :fence, :'lease_id', :run_id, 'succeeded', p_wanted_at => nullif(:'wanted_at', '')::timestamptz) \gset
\if :is_wanted
    -- Somebody asked for a run meanwhile, and went away because of this one: say that there may be more to do.
    select from gaffer.end_run(:'job', 0, :fence, :'lease_id', :run_id, 'capped');
    \echo capped
\else
    \echo succeeded
\endif
SQL
    code=$?
    run <<'SQL' || true
select from gaffer.job_runs as run, gaffer.end_run(
    run.job, run.slot, run.fence, run.lease_id, run.id, 'failed', p_error => 'psql failed: see its output')
 where run.lease_id = :'lease_id' and run.outcome = 'running';
SQL
    exit $code
}
