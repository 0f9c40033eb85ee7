"""Chaos: jobs at work in several processes, faults at random, and a history that is judged.

    ./dev chaos --seed 7 --faults 1000                    one sitting
    ./dev chaos --state chaos.json --faults 20000         one of many: goes on with the next seed, and adds
    ./dev chaos --state chaos.json --report               writes benchmarks/reliability.md
    ./dev chaos --variant "time-only lease"               a protocol that is known to be wrong, which must be found

A sitting is made of rounds. A round has a database of its own; in it the jobs of `jobs.py` are run by the actors, while
faults are drawn from the one table in `faults.py`. Then everything is mended, the jobs do what is due, and what the
workers have written into the history (`history.py`) is compared with what the database says (`checker.py`, pure).

    history.py   what a worker is sure of, a JSON line for each batch that it tries
    checker.py   what must be true of a history and of the tables at the end
    board.py     a page of memory that the processes share: the worker's clock, and orders to stop or die at a place
    jobs.py      the jobs, their tables, and the work that is written down
    actors.py    who is at work: engines that run one job after another, writers that add what is due
    faults.py    what happens to them, and how often
    dagsters.py  a real Dagster at work: two daemons, a code location (location.py), runs with orders (orders.py)
    dagster_faults.py  what happens to its processes; and statuses.py: whether what it says of its runs is so
    scene.py     what one round is played on: its server, ways to it, database, actors, and what is to be undone
    rounds.py    one round, from an empty database to the findings
    broken.py    protocols that are known to be wrong, and what finds them
    ledger.py    the state file of many sittings, and the report made from it

An actor is added as a class with `start`, `mend` (start again what has died) and `stop` (no new work; what is at work
may end, and is waited for), and is made in `Scene.cast`. Whatever works on a job writes its attempts by `jobs.Attempts`
(its `work` is the job's function, its `observe` the run's observer, `over` the end of the run), with a name that no
other process has, into a file of its own in `Scene.folder`; nothing else is needed for the checker to judge it. A job
is added to `jobs.of_round`, with a table `t_<name>` for what it did.

A fault is added as a function of a `Scene` and a row of `faults.TABLE`: its name, its weight, and what it needs (such
as `pooler`), without which it is left out and the reason said. It must not wait: whatever is to come later goes to
`scene.later(seconds, undo)`, and is done at once when the round is over. It calls `scene.struck(name, …)` once it is
sure that it has struck; where it found no victim, it calls nothing, and is not counted. What keeps jobs from working
for a while is said by `scene.impairs(seconds)`, so that nobody wonders that they do not.
"""
