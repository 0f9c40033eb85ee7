"""Scheduled Dagster jobs that must not fail quietly."""
