"""The orders in which the statements of runners can reach the server, tried one after the other on a real Postgres.

A runner is a thread that goes through the product's own code (`store`, or the whole engine). Its connection stops
before each message and asks; the explorer says who goes next, and goes through all answers depth-first: for each, the
few rows are set back, the same beginning is played again, and another end. A message that waits for a row makes its
runner *blocked* until the server lets it go. Where `inside` is asked for, the functions of the protocol stop as well,
at the places of `STOPS`: behind the lock of the lease's row, and before COMMIT with everything written; so that what
others meet in the middle of a message is tried too. Where there are too many schedules (`walks`; a row of the report
says "of about"), they are taken at random. The functions are the product's (or a broken variant of
tests/support/variants.py, to show that the explorer can see), with nothing but these stops added to their text.

The clock is the database's, moved by the explorer: `expired` means that every acquire finds the lease of the other
run over, so that a paused holder is the normal case.

One fault may come at any point of a schedule, to anybody who is not through:

    kill        the client is gone, as by kill -9; what the server has begun for it goes on to its end
    terminate   pg_terminate_backend
    lose        the answer does not arrive: the connection is cut while the message is on its way, or behind it
    restore     everything that was committed since the beginning is lost, and every connection (a backup, a fail-over)

After each schedule, one more run without a fault must finish the work, and then must hold: what was acknowledged is
there; nothing is there twice; no batch was committed under a fence after a later one was granted (in the order of the
notes that the committing transactions made under the lease's row lock); what was found out about an unknown COMMIT is
so; what is left is asked for again; nobody was refused who holds the lease, and, where there is no fault, no lease
ends and nobody releases it, each run that was granted it did its work; and all that tests/support/invariants.py knows.

What is not stopped at (`shared`): messages that read or write only what nobody else writes or reads: the begin of a
batch, its page (of rows that are there from the start), its writes to `target`, a rollback. They commute with every
message of the others, so that an order that differs only by them is the same. The schedules that are counted are those
that were run. In the same way a connection at rest is terminated only right before its next message.

    database.py  the one database of a case: the product's functions with stops in them, set back for each schedule
    gate.py      the gate: a connection that stops before each message, and the runners that wait there
    runners.py   who goes through it: a run by the functions of `store`, one of the whole engine, an operator
    cases.py     what is tried: runners, a fault, a protocol; those of the short form, and of the long one
    judge.py     what must hold after a schedule
    player.py    plays one: who goes next, the clock, the fault, and the wait until all stand again
    report.py    what came of a case, and its row
    walks.py     all schedules of a case, depth-first, or so many at random; on a server of its own, too
    __main__.py  the command: cases side by side

Each knows only those above it.
"""
