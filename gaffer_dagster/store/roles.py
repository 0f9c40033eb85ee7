"""`roles.sql`: the roles owner, runner, reader and operator, and what each may do with gaffer's tables."""

from __future__ import annotations

from importlib import resources

from psycopg import errors as pg
from psycopg import sql

from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError, MissingRightsError
from gaffer_dagster.store import db, migrate, operations
from gaffer_dagster.store.operations import Operator


def script() -> str:
    """The one statement that makes the roles and sets their rights; the same again changes nothing."""
    return resources.files("gaffer_dagster.store").joinpath("roles.sql").read_text(encoding="utf-8")


def are_set(connection: db.Connection) -> bool:
    """The schema belongs to the role owner: its rights are those of the four."""
    row = connection.execute(
        "select nspowner::pg_catalog.regrole::text = 'gaffer_owner' from pg_catalog.pg_namespace"
        " where nspname = 'gaffer'"
    ).fetchone()
    return bool(row and row[0])


def apply(connection: db.Connection, operator: Operator | None, *, try_only: bool = False) -> bool:
    """Makes the roles where they are not there, and sets their rights as this package needs them. `operator`: who asked
    for it, where somebody did. `try_only`: then it is undone. Returns whether anything was to be changed.

    Raises `BadInputError` for a role of the same name that is another, `MissingRightsError`, and
    `DatabaseUnavailableError` while another does the same.
    """
    try:
        with connection.transaction(force_rollback=try_only):
            connection.execute("set local lock_timeout = '10s'")
            migrate.lock(connection)
            before = _rights(connection)
            connection.execute(sql.SQL(script()))  # pyright: ignore[reportArgumentType] — our own file
            changed = _rights(connection) != before
            if changed and operator is not None and not try_only:
                operations.note(connection, None, "roles", operator, {})
            return changed
    except pg.DuplicateObject as error:
        raise BadInputError(db.primary_message(error)) from None
    except pg.InsufficientPrivilege as error:
        cure = migrate.owners_cure(connection) or "let an administrator run what `gaffer migrate --roles --sql` prints"
        raise MissingRightsError(
            f'the role "{connection.info.user}" may not set the rights of the four roles: {db.primary_message(error)}; '
            f"{cure}"
        ) from None
    # The roles are the server's: there the lock, which is the database's, does not help.
    except (pg.LockNotAvailable, pg.DeadlockDetected, pg.UniqueViolation):
        raise _busy() from None
    except pg.InternalError_ as error:
        if "concurrently" not in str(error):
            raise
        raise _busy() from None


def _busy() -> DatabaseUnavailableError:
    return DatabaseUnavailableError(
        "another is setting the roles (also in another database of this server), migrates, or uses the tables; nothing "
        "was changed, try again"
    )


def _rights(connection: db.Connection) -> list[tuple[object, ...]]:
    """Who owns what in the schema, and may do what with it; which of the roles are there."""
    return connection.execute(
        """
        select 'schema' as kind, oid::text, nspowner::text as owner, nspacl::text as rights
          from pg_catalog.pg_namespace where nspname = 'gaffer'
        union all
        select 'relation', c.oid::text, c.relowner::text, c.relacl::text from pg_catalog.pg_class c
          join pg_catalog.pg_namespace n on n.oid = c.relnamespace where n.nspname = 'gaffer'
        union all
        select 'function', p.oid::text, p.proowner::text, p.proacl::text from pg_catalog.pg_proc p
          join pg_catalog.pg_namespace n on n.oid = p.pronamespace where n.nspname = 'gaffer'
        union all
        select 'role', rolname::text, null, null from pg_catalog.pg_roles
         where rolname in ('gaffer_owner', 'gaffer_runner', 'gaffer_reader', 'gaffer_operator')
        union all
        select 'member', member::text, roleid::text, null from pg_catalog.pg_auth_members
         where roleid = pg_catalog.to_regrole('gaffer_owner')
         order by 1, 2, 3
        """
    ).fetchall()
