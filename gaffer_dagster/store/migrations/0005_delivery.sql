-- Notices of incidents on their way to receivers.
--
--   receiver         where notices go; its address is known only to the processes that send
--   alert_delivery   one notice of one incident to one receiver, until it was taken

create table gaffer.receiver (
    name          text primary key,
    first_seen_at timestamptz not null,        -- incidents that were over by then are not told any more
    last_seen_at  timestamptz not null,
    failing_since timestamptz,
    error         text
);

create table gaffer.alert_delivery (
    id              bigint generated always as identity primary key,
    alert           bigint not null references gaffer.alert (id),
    notice          text not null check (notice in ('opened', 'reminded', 'resolved')),
    number          integer not null,          -- of the reminder; else 0
    receiver        text not null references gaffer.receiver (name),
    created_at      timestamptz not null,
    message         uuid,                      -- the one that it went in, the same in every attempt
    attempts        integer not null default 0,
    next_attempt_at timestamptz not null,
    delivered_at    timestamptz,
    error           text,
    unique (alert, notice, number, receiver)
);

create index alert_delivery_left on gaffer.alert_delivery (receiver, id) where delivered_at is null;
