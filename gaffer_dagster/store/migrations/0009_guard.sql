-- Protected tables: the database itself refuses whatever is written outside a fenced batch. Against accidents (a check
-- that was forgotten, autocommit, a COMMIT in the batch's own code, psql by hand), not against malice: whoever may set
-- a setting can forge the marks, and a table's owner can drop the triggers.
--
--   begin_batch    marks the transaction (gaffer.batch)
--   gaffer_guard   before a statement: refuses it at once where the mark is not there
--   gaffer_seal    after the first row that a transaction writes: puts one deferred check in the queue
--   commit_batch   has verified the fence, whose row stays locked from then on: seals the transaction (gaffer.seal)
--   COMMIT         runs the check: without this transaction's seal, or with another job's, nothing is committed
--
-- The marks and the seal are settings of the transaction. A savepoint that is rolled back takes back those that were
-- made in it, together with the checks that were queued in it; so nothing is left behind, in no table.
--
-- Row triggers come with every partition, also one that is made or attached later; statement triggers do not, so what
-- is written to such a partition by its own name is refused at COMMIT, and TRUNCATE of it only after `gaffer protect`
-- was run again. A run that names the table in `protect` refuses to work until then.
--
-- The triggers fire for what originates here (ENABLE ORIGIN, the default): logical replication applies what was checked
-- where it was written, and pg_restore --disable-triggers can load data.

create table gaffer.protected_table (
    guard        uuid primary key default gen_random_uuid(),  -- its triggers know it by this: an oid does not last
    relation     regclass not null unique,
    jobs         text[] check (cardinality(jobs) > 0),        -- whose batches may write; null: any job's
    protected_at timestamptz not null
);

-- What was truncated by a transaction that is not over: its own check takes the row away.
create table gaffer.truncated_table (
    id    bigint generated always as identity primary key,
    guard uuid not null
);

-- A table that any job may write has no job to be noted at.
create function gaffer.note_action(p_table gaffer.protected_table, p_action text, p_by text, p_reason text) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    select job, p_action, gaffer.clock(), p_by, p_reason, jsonb_build_object('table', p_table.relation::text)
      from unnest(coalesce(p_table.jobs, array[null::text])) as job
$$;

create function gaffer.refuse_write(p_table gaffer.protected_table, p_what text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'table % is protected, and %: write it in a batch of %, between gaffer.begin_batch and '
        'gaffer.commit_batch with COMMIT (in Python: through the batch); to mend it by hand: select '
        'gaffer.allow_writes(''why'') in the same transaction', p_table.relation, p_what,
        coalesce('job "' || array_to_string(p_table.jobs, '" or "') || '"', 'any job')
        using errcode = 'GF002';
end $$;

create function gaffer.protected_by(p_guard uuid) returns gaffer.protected_table
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_table gaffer.protected_table;
begin
    select * into v_table from gaffer.protected_table where guard = p_guard;
    if not found then
        raise exception 'this table has triggers of gaffer protect, and gaffer.protected_table does not know it (a table '
            'restored alone?): run gaffer protect TABLE anew, or gaffer unprotect TABLE' using errcode = 'GF002';
    end if;
    return v_table;
end $$;

-- Before a statement where no batch is open, and before each TRUNCATE, which has no rows to queue a check with. Whose
-- batch it is, is asked at COMMIT, when it has been verified.
create function gaffer.guard() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if split_part(current_setting('gaffer.allowed', true), ':', 1) is distinct from pg_current_xact_id()::text
       and nullif(current_setting('gaffer.batch', true), '') is null then
        perform gaffer.refuse_write(gaffer.protected_by(tg_argv[0]::uuid), 'no batch is open in this transaction');
    end if;
    if tg_op = 'TRUNCATE' then
        insert into gaffer.truncated_table (guard) values (tg_argv[0]::uuid);
    end if;
    return null;
end $$;

-- At COMMIT, where the seal is not that of a batch that may write the table.
create function gaffer.note_or_refuse(p_guard uuid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_table gaffer.protected_table := gaffer.protected_by(p_guard);
    v_xact text := pg_current_xact_id()::text;
    v_seal text := current_setting('gaffer.seal', true);
    v_allowed text := current_setting('gaffer.allowed', true);
begin
    if split_part(v_allowed, ':', 1) = v_xact then
        perform gaffer.note_action(v_table, 'write', session_user, substr(v_allowed, length(v_xact) + 2));
    elsif split_part(v_seal, ':', 1) = v_xact then
        perform gaffer.refuse_write(v_table, format('this was a batch of job "%s"', split_part(v_seal, ':', 2)));
    else
        perform gaffer.refuse_write(v_table, 'was to be committed without gaffer.commit_batch (SET CONSTRAINTS ALL '
                                             'IMMEDIATE asks too early: name your own constraints)');
    end if;
end $$;

-- At COMMIT. A seal of this transaction says that commit_batch has verified the fence in it, and has the lease's row
-- locked since; so the fence is still the current one, and need not be read again. One statement: every batch pays it.
create function gaffer.check_seal() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from gaffer.protected_table
      where guard = tg_argv[0]::uuid
        and split_part(current_setting('gaffer.seal', true), ':', 1) = pg_current_xact_id()::text
        and (jobs is null or split_part(current_setting('gaffer.seal', true), ':', 2) = any (jobs));
    if not found then
        perform gaffer.note_or_refuse(tg_argv[0]::uuid);
    end if;
    return null;
end $$;

create function gaffer.check_truncation() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from gaffer.truncated_table where id = new.id;
    perform from gaffer.protected_table
      where guard = new.guard
        and split_part(current_setting('gaffer.seal', true), ':', 1) = pg_current_xact_id()::text
        and (jobs is null or split_part(current_setting('gaffer.seal', true), ':', 2) = any (jobs));
    if not found then
        perform gaffer.note_or_refuse(new.guard);
    end if;
    return null;
end $$;

create constraint trigger gaffer_seal after insert on gaffer.truncated_table
    deferrable initially deferred for each row execute function gaffer.check_truncation();

-- Lets this transaction write protected tables outside a batch: for a migration, or to mend something by hand. Each
-- table that it writes is noted in gaffer.operator_action when it commits, with who (session_user) and why.
create function gaffer.allow_writes(p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if coalesce(btrim(p_reason), '') = '' then
        raise exception 'say why: select gaffer.allow_writes(''…''), in the transaction that writes'
            using errcode = 'GF002';
    end if;
    perform set_config('gaffer.allowed', pg_current_xact_id()::text || ':' || p_reason, true);
end $$;

-- The table itself, and all that is written through it: partitions, and tables that inherit from it.
create function gaffer.family_of(p_table regclass) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive family (relation) as (
        select p_table
        union
        select i.inhrelid::regclass from pg_inherits i join family f on i.inhparent = f.relation
    )
    select relation from family
$$;

-- Remembers what `protect` and `unprotect` do to the table's triggers.
create function gaffer.note_protection(p_table regclass, p_jobs text[], p_by text, p_reason text)
returns gaffer.protected_table
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_table gaffer.protected_table;
    v_job text;
begin
    if not exists (select from pg_class where oid = p_table and relpersistence <> 't'
                      and relnamespace <> all ('{gaffer,pg_catalog,information_schema}'::regnamespace[])) then
        raise exception 'table % cannot be protected: name a table of your own that is not temporary',
            coalesce(p_table::text, 'null') using errcode = 'invalid_parameter_value';
    end if;
    foreach v_job in array coalesce(p_jobs, '{}') loop
        if not exists (select from gaffer.job where name = v_job) then
            raise exception 'job "%" is not registered: gaffer register MODULE, or see gaffer status for its name', v_job
                using errcode = 'GF006';
        end if;
    end loop;
    if exists (select from pg_trigger where tgrelid = p_table and tgname = 'gaffer_seal' and tgparentid <> 0) then
        raise exception 'table % is protected with the table that it is a partition of: name that one', p_table
            using errcode = 'GF002';
    end if;
    delete from gaffer.protected_table
     where relation <> p_table and relation in (select gaffer.family_of(p_table));
    insert into gaffer.protected_table as t (relation, jobs, protected_at) values (p_table, p_jobs, gaffer.clock())
    on conflict (relation) do update
       set jobs = case when excluded.jobs is null then t.jobs
                       else array(select distinct unnest(t.jobs || excluded.jobs) order by 1) end
    returning * into v_table;
    perform gaffer.note_action(v_table, 'protect', p_by, p_reason);
    return v_table;
end $$;

create function gaffer.forget_protection(p_table regclass, p_by text, p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_table gaffer.protected_table;
begin
    if exists (select from pg_trigger where tgrelid = p_table and tgname = 'gaffer_seal' and tgparentid <> 0) then
        raise exception 'table % is protected with the table that it is a partition of: name that one, or detach it',
            p_table using errcode = 'GF002';
    end if;
    delete from gaffer.protected_table where relation = p_table returning * into v_table;
    if found then
        perform gaffer.note_action(v_table, 'unprotect', p_by, p_reason);
    end if;
end $$;

create function gaffer.drop_guards(p_table regclass) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_each record;
    v_found boolean := false;
begin
    for v_each in
        select t.tgname, relation from pg_trigger t join gaffer.family_of(p_table) as relation on t.tgrelid = relation
         where t.tgname in ('gaffer_guard', 'gaffer_guard_truncate', 'gaffer_seal') and t.tgparentid = 0
    loop
        execute format('drop trigger %I on %s', v_each.tgname, v_each.relation);
        v_found := true;
    end loop;
    return v_found;
end $$;

-- Protects the table, and its partitions and children, for batches of these jobs; where it is protected already, these
-- jobs are added, and what came later is protected too. Left out: any job's batch (or as it was). Asks to own
-- each. Returns how many tables are guarded.
create function gaffer.protect(
    p_table regclass, p_jobs text[] default null, p_by text default session_user, p_reason text default null
) returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_guard uuid;
    v_flag text;
    v_each regclass;
    v_count integer := 0;
begin
    if p_table is not null then  -- no partition may come in between
        execute format('lock table %s in share row exclusive mode', p_table);
    end if;
    v_guard := (gaffer.note_protection(p_table, p_jobs, p_by, p_reason)).guard;
    v_flag := 'gaffer.guard_' || replace(v_guard::text, '-', '');
    perform gaffer.drop_guards(p_table);
    for v_each in select gaffer.family_of(p_table) loop
        execute format(
            'create trigger gaffer_guard before insert or update or delete on %s for each statement'
            ' when (coalesce(length(current_setting(''gaffer.batch'', true)), 0) = 0) execute function gaffer.guard(%L)',
            v_each, v_guard);
        execute format('create trigger gaffer_guard_truncate before truncate on %s for each statement'
                       ' execute function gaffer.guard(%L)', v_each, v_guard);
        if not exists (select from pg_trigger where tgrelid = v_each and tgname = 'gaffer_seal') then
            -- The first row sets the flag as it is looked at, so that only one check is queued for a transaction.
            execute format(
                'create constraint trigger gaffer_seal after insert or update or delete on %s'
                ' deferrable initially deferred for each row'
                ' when (current_setting(%2$L, true) is distinct from ''queued'''
                ' and set_config(%2$L, ''queued'', true) = ''queued'') execute function gaffer.check_seal(%3$L)',
                v_each, v_flag, v_guard);
        end if;
        v_count := v_count + 1;
    end loop;
    return v_count;
end $$;

-- False: it was not protected.
create function gaffer.unprotect(p_table regclass, p_by text default session_user, p_reason text default null)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    perform gaffer.forget_protection(p_table, p_by, p_reason);
    return gaffer.drop_guards(p_table);
end $$;

-- Refuses a run whose job demands that the table is protected for it, where that is not so.
create function gaffer.require_protection(p_table regclass, p_job text) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_open text;
    v_jobs text[];
begin
    select string_agg(relation::text, ', ' order by relation::text) into v_open
      from gaffer.family_of(p_table) as relation
     where 3 <> (select count(*) from pg_trigger t
                  where t.tgrelid = relation and t.tgenabled in ('O', 'A')
                    and ((t.tgname in ('gaffer_guard', 'gaffer_guard_truncate') and t.tgfoid = 'gaffer.guard()'::regprocedure)
                         or (t.tgname = 'gaffer_seal' and t.tgfoid = 'gaffer.check_seal()'::regprocedure)));
    if v_open is not null then
        raise exception 'job "%" demands that table % is protected, and % is not; run: gaffer protect % --job %',
            p_job, p_table, v_open, p_table, p_job using errcode = 'GF002';
    end if;
    select (gaffer.protected_by(left(encode(tgargs, 'escape'), 36)::uuid)).jobs into v_jobs
      from pg_trigger where tgrelid = p_table and tgname = 'gaffer_seal';
    if p_job <> all (v_jobs) then
        raise exception 'table % is protected, and only job "%" may write it; run: gaffer protect % --job %',
            p_table, array_to_string(v_jobs, '" or "'), p_table, p_job using errcode = 'GF002';
    end if;
end $$;
