-- Notices of incidents on their way to receivers.
--
--   receiver         where notices go; its address is known only to the processes that send
--   alert_delivery   one notice of one incident to one receiver, until it was taken
--
-- Whoever knows a receiver asks for its notices: claim_notices makes the rows that are missing, picks what is one
-- message and puts off its next attempt, all before it is sent; note_delivery tells how that went. So a sender that
-- dies leaves a message that is sent later, perhaps a second time, under the same key; it is never lost, and no two
-- processes are at one message within a minute.

create table gaffer.receiver (
    name          text primary key check (name ~ '^[a-z_][a-z0-9_]{0,62}$'),
    first_seen_at timestamptz not null,        -- incidents that were over by then are not told any more
    last_seen_at  timestamptz not null,
    failing_since timestamptz,
    error         text check (length(error) <= 20000)
);

create table gaffer.alert_delivery (
    id              bigint generated always as identity primary key,
    alert           bigint not null references gaffer.alert (id),
    notice          text not null check (notice in ('opened', 'reminded', 'resolved')),
    number          integer not null,          -- of the reminder; else 0
    receiver        text not null references gaffer.receiver (name),
    created_at      timestamptz not null,
    message         uuid,                      -- the key of the message that it goes in, the same in every attempt
    attempts        integer not null default 0,
    next_attempt_at timestamptz not null,
    delivered_at    timestamptz,
    dropped_at      timestamptz,               -- there was no need any more to tell it
    error           text check (length(error) <= 20000),
    unique (alert, notice, number, receiver)
);

create index alert_delivery_left on gaffer.alert_delivery (receiver, id)
    where delivered_at is null and dropped_at is null;
create index alert_resolved on gaffer.alert (resolved_at);

-- Whether the job was muted at a time that has passed.
create function gaffer.was_muted(p_job text, p_at timestamptz) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((select (details ->> 'until')::timestamptz > p_at
                       from gaffer.operator_action
                      where job = p_job and action in ('mute', 'unmute') and at <= p_at
                      order by id desc limit 1), false)
$$;

-- Whether this receiver is told of an incident like that at all. The log is told of every one.
create function gaffer.is_told(
    p_receiver text, p_least text, p_severity text, p_spec jsonb
) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select p_receiver = 'log'
        or (p_least = 'warning' or p_severity = 'error')
           and coalesce(nullif(p_spec #> '{alerts,receivers}', 'null') ? p_receiver, true)
$$;

-- The next message for a receiver that takes incidents of this severity or above: its key. Null: nothing is due, or
-- somebody else is at it. More than five notices that are due at once go out as one message; one that was tried before
-- stays what it was.
create function gaffer.claim_notices(p_receiver text, p_least text) returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_receiver gaffer.receiver;
    v_now timestamptz;
    v_since timestamptz;
    v_due gaffer.alert_delivery[];
    v_new bigint[];
    v_message uuid;
begin
    perform gaffer.raise_durability();
    insert into gaffer.receiver (name, first_seen_at, last_seen_at)
    values (p_receiver, gaffer.clock(), gaffer.clock()) on conflict do nothing;
    select * into v_receiver from gaffer.receiver where name = p_receiver for no key update skip locked;
    if not found then
        return null;
    end if;
    v_now := gaffer.clock();
    -- What was resolved before the last look is done with; an hour, for passes that began before it.
    v_since := least(v_receiver.last_seen_at, v_now) - interval '1 hour';
    update gaffer.receiver set last_seen_at = v_now where name = p_receiver;

    insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at)
    select a.id, 'opened', 0, p_receiver, v_now, v_now
      from gaffer.alert a
      left join gaffer.job j on j.name = a.job
     where (a.resolved_at is null or a.resolved_at >= greatest(v_since, v_receiver.first_seen_at))
       and gaffer.is_told(p_receiver, p_least, a.severity, j.spec)
       and not exists (select from gaffer.alert_delivery d
                        where d.alert = a.id and d.notice = 'opened' and d.receiver = p_receiver)
     order by a.id;
    insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at)
    select a.id, 'reminded', a.reminders, p_receiver, v_now, v_now
      from gaffer.alert a
      join gaffer.alert_delivery o on o.alert = a.id and o.notice = 'opened' and o.receiver = p_receiver
      left join gaffer.job j on j.name = a.job
     where a.resolved_at is null and a.acked_at is null and a.reminders > 0 and o.delivered_at < a.reminded_at
       and gaffer.is_told(p_receiver, p_least, a.severity, j.spec)
       and not exists (select from gaffer.alert_delivery d
                        where d.alert = a.id and d.notice = 'reminded' and d.number = a.reminders
                          and d.receiver = p_receiver)
     order by a.id;
    -- A reminder that was overtaken; an incident that opened and was over within a mute.
    update gaffer.alert_delivery d set dropped_at = v_now
      from gaffer.alert a
     where a.id = d.alert and d.receiver = p_receiver and d.delivered_at is null and d.dropped_at is null
       and (d.notice = 'reminded'
            and (a.resolved_at is not null or a.acked_at is not null or d.number < a.reminders)
            or d.notice = 'opened' and d.attempts = 0 and p_receiver <> 'log' and a.resolved_at is not null
            and gaffer.was_muted(a.job, a.opened_at) and gaffer.was_muted(a.job, a.resolved_at));
    insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at)
    select a.id, 'resolved', 0, p_receiver, v_now, v_now
      from gaffer.alert a
      join gaffer.alert_delivery o on o.alert = a.id and o.notice = 'opened' and o.receiver = p_receiver
     where a.resolved_at >= v_since and o.dropped_at is null
       and not exists (select from gaffer.alert_delivery d
                        where d.alert = a.id and d.notice = 'resolved' and d.receiver = p_receiver)
     order by a.id;

    select array_agg(due order by due.id) into v_due from (
        select d.*
          from gaffer.alert_delivery d
          join gaffer.alert a on a.id = d.alert
          left join gaffer.job j on j.name = a.job
         where d.receiver = p_receiver and d.delivered_at is null and d.dropped_at is null
           -- A time further ahead than any may be was set while the clock ran ahead.
           and (d.next_attempt_at <= v_now or d.next_attempt_at > v_now + interval '2 hours')
           and (p_receiver = 'log' or j.muted_until is null or j.muted_until <= v_now)
           and (d.notice <> 'resolved'
                or exists (select from gaffer.alert_delivery o
                            where o.alert = d.alert and o.notice = 'opened' and o.receiver = p_receiver
                              and o.delivered_at is not null))
         order by d.id
           for update of d skip locked
         limit 1000) due;
    if v_due is null then
        return null;
    end if;
    v_message := v_due[1].message;
    if v_message is null then
        select array_agg(due.id) into v_new from unnest(v_due) due where due.message is null;
        if cardinality(v_new) > 5 then
            v_message := gen_random_uuid();
        else
            v_new := array[v_due[1].id];
            select md5(format('%s/%s/%s', a.key, v_due[1].notice, v_due[1].number))::uuid into v_message
              from gaffer.alert a where a.id = v_due[1].alert;
        end if;
    end if;
    update gaffer.alert_delivery
       set message = v_message, attempts = attempts + 1, next_attempt_at = v_now + interval '1 minute'
     where receiver = p_receiver and delivered_at is null and dropped_at is null
       and (message = v_message or id = any (v_new));
    return v_message;
end $$;

-- How an attempt to send a message went. After a failure the next one is in about a minute, then in two, up to an hour.
create function gaffer.note_delivery(p_receiver text, p_message uuid, p_error text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
begin
    p_error := left(p_error, 20000);
    perform gaffer.raise_durability();
    update gaffer.alert_delivery
       set error = p_error,
           delivered_at = case when p_error is null then v_now end,
           next_attempt_at = case when p_error is null then next_attempt_at else
               v_now + least(interval '1 hour', interval '30 seconds' * 2 ^ least(attempts, 10))
                       * (0.5 + random() / 2) end
     where receiver = p_receiver and message = p_message and delivered_at is null and dropped_at is null;
    update gaffer.receiver
       set error = p_error, failing_since = case when p_error is not null then coalesce(failing_since, v_now) end
     where name = p_receiver;
end $$;

-- The success that a job's heartbeat was last sent for.
create function gaffer.note_ping(p_job text, p_success timestamptz) returns void
language sql security definer
set search_path = pg_catalog, pg_temp
as $$
    update gaffer.job set pinged_at = p_success where name = p_job and pinged_at is distinct from p_success;
$$;
