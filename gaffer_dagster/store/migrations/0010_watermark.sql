-- Where people set a watermark. Nobody may be at work meanwhile, and whoever still thinks that he holds the lease can
-- commit nothing over it: every slot's fence is raised.

create function gaffer.set_watermark(
    p_job text, p_from jsonb, p_to jsonb, p_cluster text, p_by text, p_reason text
) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := gaffer.clock();
begin
    perform gaffer.keep_idle(p_job);
    update gaffer.job_lease set fence = fence + 1, lease_id = null, lease_until = 'epoch' where job = p_job;
    insert into gaffer.job_watermark (job, updated_at) values (p_job, v_now) on conflict do nothing;  -- it was lost
    update gaffer.job_watermark set position = p_to, cluster = p_cluster, updated_at = v_now
     where job = p_job and position is not distinct from p_from;
    if not found then
        raise exception 'the watermark of job "%" was moved meanwhile; look at it again', p_job using errcode = 'GF005';
    end if;
    update gaffer.job set follow_up_at = v_now where name = p_job;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, 'set watermark', v_now, p_by, p_reason, jsonb_build_object('from', p_from, 'to', p_to));
end $$;

-- The database was restored, and is the one to work with from now on: a job goes on from the watermark that it has, as
-- this cluster counts it (`p_to`; null: it stays as it is). Tokens that left the database since it was backed up (names
-- of files, headers of requests) carry fences that it has never seen; so each slot's goes ahead of any that can have
-- been given.
create function gaffer.adopt(p_job text, p_from jsonb, p_to jsonb, p_by text, p_reason text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c_gap constant bigint := 1000000;
    v_now timestamptz := gaffer.clock();
    v_fences bigint[];
    v_before gaffer.job_watermark;
begin
    perform gaffer.raise_durability();
    perform gaffer.keep_idle(p_job);
    select array_agg(fence order by slot) into v_fences from gaffer.job_lease where job = p_job;
    update gaffer.job_lease set fence = fence + c_gap, lease_id = null, lease_until = 'epoch' where job = p_job;
    select * into v_before from gaffer.job_watermark where job = p_job for no key update;
    if p_to is not null then
        if v_before.position is distinct from p_from then
            raise exception 'the watermark of job "%" was moved meanwhile; look at it again', p_job
                using errcode = 'GF005';
        end if;
        update gaffer.job_watermark set position = p_to, cluster = gaffer.cluster(), updated_at = v_now where job = p_job;
    end if;
    update gaffer.job set follow_up_at = v_now where name = p_job;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, 'adopt', v_now, p_by, p_reason, jsonb_build_object(
                'from', v_before.position, 'to', coalesce(p_to, v_before.position),
                'from_cluster', v_before.cluster, 'cluster', gaffer.cluster(),
                'timeline', (select timeline_id from pg_control_checkpoint()), 'fences', v_fences, 'gap', c_gap));
end $$;
