{# dbt's invocation_id is a random uuid, the same for all hooks and threads of one `dbt run`: it is the lease's id. #}

{% macro gaffer_acquire() %}
do $$
declare
    v_grant gaffer.lease_grant;
begin
    perform gaffer.register_external('{{ var("gaffer_job") }}');
    v_grant := gaffer.acquire('{{ var("gaffer_job") }}', 0, '{{ invocation_id }}', p_ttl => '10 minutes');
    if v_grant.outcome <> 'granted' then
        raise exception 'gaffer job % is %: %', '{{ var("gaffer_job") }}', v_grant.outcome, v_grant.holder;
    end if;
end $$; commit
{% endmacro %}

{% macro gaffer_begin() %}
select gaffer.begin_batch('{{ invocation_id }}', '1 hour')
{% endmacro %}

{% macro gaffer_commit() %}
select gaffer.commit_batch(run.job, run.slot, run.fence, run.lease_id, run.id, '{{ invocation_id }}',
                           p_ttl => '10 minutes')
  from (select 1) as one left join gaffer.job_runs as run on run.lease_id = '{{ invocation_id }}'
{% endmacro %}

{% macro gaffer_end(results) %}
{% set bad = results | selectattr('status', 'in', ['error', 'fail', 'runtime error']) | list %}
do $$
declare
    r gaffer.job_runs;
begin
    select * into r from gaffer.job_runs where lease_id = '{{ invocation_id }}' and outcome = 'running';
    if not found then
        return;   -- it never began, or another run has found it dead
    {% if bad %}
    end if;
    perform gaffer.end_run(r.job, r.slot, r.fence, r.lease_id, r.id, 'failed',
                           p_error => '{{ bad | length }} of {{ results | length }} dbt nodes failed');
    {% else %}
    elsif (gaffer.end_run(r.job, r.slot, r.fence, r.lease_id, r.id)).result = 'wanted' then
        -- Somebody asked for a run meanwhile, and went away because of this one: say that there may be more to do.
        perform gaffer.end_run(r.job, r.slot, r.fence, r.lease_id, r.id, 'capped');
    end if;
    {% endif %}
end $$; commit
{% endmacro %}
