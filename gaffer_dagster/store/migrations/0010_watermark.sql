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
    update gaffer.job_watermark set position = p_to, cluster = p_cluster, updated_at = v_now
     where job = p_job and position is not distinct from p_from;
    if not found then
        raise exception 'the watermark of job "%" was moved meanwhile; look at it again', p_job using errcode = 'GF005';
    end if;
    update gaffer.job set follow_up_at = v_now where name = p_job;
    insert into gaffer.operator_action (job, action, at, by, reason, details)
    values (p_job, 'set watermark', v_now, p_by, p_reason, jsonb_build_object('from', p_from, 'to', p_to));
end $$;
