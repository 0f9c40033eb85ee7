import gaffer_dagster as gd


def delays(batch: gd.Batch) -> dict[str, int]:
    """Whom to write to, since the flight was late."""
    batch.insert("delays", [{"flight": row["id"], "minutes": row["delay"]} for row in batch.rows])
    return {"longest": max(row["delay"] for row in batch.rows)}
