-- Rows of `PendingRows` that failed. A row that never did has none here, and a row that is done has none any more.
--
-- A row is worked on in its job's batches, whose transaction holds it (FOR UPDATE SKIP LOCKED). When its work fails it
-- is tried again after a while, and parked once its attempts are used up. A row whose process died is told by an
-- attempt that was committed before the work on it began and has no error since (charge_item). A process that lives and
-- is not to blame the row takes that attempt back.

create table gaffer.job_item (
    job             text not null references gaffer.job (name) on update cascade,
    key             text not null,           -- of the row, as text
    attempts        integer not null check (attempts >= 0),
    next_attempt_at timestamptz not null
                    check (next_attempt_at between '0001-01-02 00:00+00' and '9999-01-01 00:00+00'),
    first_failed_at timestamptz not null,
    failed_at       timestamptz not null,
    sqlstate        text,
    error           text,                    -- null: nothing was heard of the last attempt
    parked_at       timestamptz,             -- its attempts are used up; it waits for somebody
    dropped_at      timestamptz,             -- somebody gave it up: it stays where it is, and nobody is told
    check (greatest(length(sqlstate), length(error)) <= 20000),
    primary key (job, key)
);

create index job_item_due on gaffer.job_item (job, next_attempt_at) where parked_at is null and dropped_at is null;
create index job_item_parked on gaffer.job_item (job) where parked_at is not null and dropped_at is null;

-- How long to wait after this many attempts: doubled with each up to an hour, and spread, so that what failed together
-- does not come back together.
create function gaffer.back_off(p_attempts integer, p_backoff interval) returns interval
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select least(p_backoff * power(2, least(greatest(p_attempts - 1, 0), 20)), greatest(p_backoff, interval '1 hour'))
           * (0.75 + random() / 2)
$$;

create function gaffer.count_parked(p_job text, p_at timestamptz) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job
       set parked = found.rows, parked_at = case when found.rows > 0 then coalesce(parked_at, p_at) end
      from (select count(*) as rows from gaffer.job_item
             where job = p_job and parked_at is not null and dropped_at is null) as found
     where name = p_job and (parked > 0 or found.rows > 0)
$$;

-- Commits an attempt before the work on the row begins, so that it counts even if the process does not survive it.
-- `p_entry`: says of that attempt, the row's `p_charged`th, what is to be here instead of what it left, as far as that
-- is still here; '{}': nothing. What it does not name stays.
create function gaffer.charge_item(
    p_job text, p_slot integer, p_fence bigint, p_lease_id uuid, p_key text, p_backoff interval,
    p_charged integer default null, p_entry jsonb default null
) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
    v_entry gaffer.job_item;
begin
    perform gaffer.raise_durability();
    perform 1 from gaffer.job_lease
      where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id for no key update;
    if not found then
        raise exception '%', gaffer.lost_lease(p_job, p_slot, p_fence, p_lease_id) using errcode = 'GF001';
    end if;
    if p_entry = '{}' then
        delete from gaffer.job_item where job = p_job and key = p_key and attempts = p_charged and error is null
                                      and parked_at is null and dropped_at is null;
        return;
    elsif p_entry is not null then
        v_entry := jsonb_populate_record(null::gaffer.job_item, p_entry);
        update gaffer.job_item
           set attempts = coalesce(v_entry.attempts, attempts),
               next_attempt_at = coalesce(v_entry.next_attempt_at, next_attempt_at),
               failed_at = coalesce(v_entry.failed_at, failed_at),
               sqlstate = left(v_entry.sqlstate, 5), error = left(v_entry.error, 2000)
         where job = p_job and key = p_key and attempts = p_charged and error is null and parked_at is null;
        return;
    end if;
    insert into gaffer.job_item as i (job, key, attempts, next_attempt_at, first_failed_at, failed_at)
    values (p_job, p_key, 1, v_now + gaffer.back_off(1, p_backoff), v_now, v_now)
    on conflict (job, key) do update
       set attempts = i.attempts + 1, next_attempt_at = v_now + gaffer.back_off(i.attempts + 1, p_backoff),
           failed_at = v_now, sqlstate = null, error = null;
end $$;

-- How a batch's rows went, in the transaction of the batch: {"attempts": 5, "backoff": seconds, "forget": [key, …],
-- "failed": [{"key", "error", "sqlstate", "charged"}, …]}. Returns how many rows were parked.
create function gaffer.settle_items(p_job text, p_items jsonb, p_now timestamptz) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    c_attempts constant integer := (p_items ->> 'attempts')::integer;
    c_backoff constant interval := make_interval(secs => (p_items ->> 'backoff')::double precision);
    v_parked bigint;
    v_freed bigint;
begin
    with forgotten as (
        delete from gaffer.job_item
         where job = p_job and key in (select jsonb_array_elements_text(p_items -> 'forget'))
        returning parked_at is not null and dropped_at is null as was_parked
    )
    select count(*) into v_freed from forgotten where was_parked;
    with failed as (
        insert into gaffer.job_item as i (job, key, attempts, next_attempt_at, first_failed_at, failed_at, sqlstate,
                                          error, parked_at)
        select p_job, f.key, f.attempts, p_now + gaffer.back_off(f.attempts, c_backoff), p_now, p_now,
               left(f.sqlstate, 5), left(f.error, 2000), case when f.attempts >= c_attempts then p_now end
          from (select key, error, sqlstate, case when charged then 0 else 1 end as attempts
                  from jsonb_to_recordset(p_items -> 'failed') as (key text, error text, sqlstate text, charged boolean)
               ) as f
        on conflict (job, key) do update
           set attempts = i.attempts + excluded.attempts,
               next_attempt_at = p_now + gaffer.back_off(i.attempts + excluded.attempts, c_backoff),
               failed_at = p_now, sqlstate = excluded.sqlstate, error = excluded.error,
               parked_at = case when i.attempts + excluded.attempts >= c_attempts then p_now end
        returning parked_at
    )
    select count(parked_at) into v_parked from failed;
    if v_freed > 0 or v_parked > 0 then
        perform gaffer.count_parked(p_job, p_now);
    end if;
    return v_parked;
end $$;

-- What people do to rows that failed: `retry` with all their attempts anew, or `drop` for good. `p_keys` null: to all
-- that are parked. Returns the keys.
create function gaffer.change_items(
    p_job text, p_action text, p_keys text[], p_by text, p_reason text
) returns setof text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
    v_keys text[];
begin
    if p_action is null or p_action <> all (array['retry', 'drop']) then
        raise exception 'what is done to rows that failed is retry or drop, not %', p_action
            using errcode = 'invalid_parameter_value';
    end if;
    perform 1 from gaffer.job where name = p_job for no key update;
    if not found then
        raise exception 'job "%" is not registered', p_job using errcode = 'GF006';
    end if;
    with changed as (
        update gaffer.job_item
           set attempts = case p_action when 'retry' then 0 else attempts end,
               next_attempt_at = case p_action when 'retry' then v_now else next_attempt_at end,
               parked_at = case p_action when 'drop' then parked_at end,
               dropped_at = case p_action when 'drop' then v_now end
         where job = p_job and (key = any (p_keys) or (p_keys is null and parked_at is not null and dropped_at is null))
        returning key
    )
    select array_agg(key order by key) into v_keys from changed;
    if v_keys is not null then
        perform gaffer.count_parked(p_job, v_now);
        update gaffer.job set follow_up_at = v_now where name = p_job and p_action = 'retry';
        insert into gaffer.operator_action (job, action, at, by, reason, details)
        values (p_job, p_action || ' items', v_now, p_by, p_reason,
                jsonb_build_object('keys', v_keys[:1000], 'rows', cardinality(v_keys)));
    end if;
    return query select unnest(v_keys);
end $$;

-- `exclusion="advisory"`: the key of the lock that each batch of a job holds from its begin to its COMMIT. Whoever
-- takes the same one (select pg_advisory_xact_lock(gaffer.advisory_key('job'))) keeps batches away for so long.
create function gaffer.advisory_key(p_job text) returns bigint
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_job is null then  -- a lock of null would be none
        raise exception 'advisory_key needs the name of a job' using errcode = 'invalid_parameter_value';
    end if;
    return ('x' || left(encode(sha256(convert_to('gaffer_dagster/' || p_job, 'UTF8')), 'hex'), 16))::bit(64)::bigint;
end $$;

-- Takes that lock for this transaction, or says who has it; null: it is taken. On its own, since a lock function
-- within a query also locks for rows that are not returned.
create function gaffer.lock_batch(p_job text) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    c_key constant bigint := gaffer.advisory_key(p_job);
begin
    if pg_try_advisory_xact_lock(c_key) then
        return null;
    end if;
    return coalesce(
        (select format('backend %s (user %s, database %s, application %s)', l.pid, a.usename, a.datname,
                       nullif(a.application_name, ''))
           from pg_locks l left join pg_stat_activity a on a.pid = l.pid
          where l.locktype = 'advisory' and l.granted and l.objsubid = 1
            and l.database = (select oid from pg_database where datname = current_database())
            and l.classid = ((c_key >> 32) & 4294967295)::oid and l.objid = (c_key & 4294967295)::oid
          limit 1),
        'a backend that is just gone');
end $$;
