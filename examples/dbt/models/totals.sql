{{ config(unique_key='day') }}
select ordered_on as day, count(*) as orders from {{ target.schema }}.orders group by 1
