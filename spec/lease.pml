/* One job, its lease, and N processes that want to do its work.

   Read this beside gaffer_dagster/store/migrations/0002_protocol.sql, whose decisions it follows. `./dev model` has
   spin try every order in which the steps below can happen; a claim that fails in one of them is printed as a story.

   What stands for what

   The database is what is committed: `db`. One slot of one job: its lease (fence, lease_id), its watermark, its
   runs, `wanted_at`, and the data. The rows of the source are numbered 1, 2, …; the first `due` of them are there. A
   batch is one row. It writes who did the row (`done_by`), where a second doing shows; and it overwrites a total by
   what it knows, where a later one is lost by an earlier one that comes late.

   A transaction that reads and decides under the lock of the lease row is one step, since whoever else would decide
   waits for that lock. Two are split, because the place between is what this is about: the last message of a batch
   (check | write and COMMIT) and the end (the lease row locked | the job's row read, COMMIT). What a transaction wrote
   before its COMMIT nobody sees, so it is not there.

   Time has no length. A lease may be found expired as soon as it is granted, or never; a pause is that a process takes
   no step while others do. So renewing it changes nothing here, and is left out; what renewing can say, "it is lost,
   stop", is one of the moments at which a process is told to stop: any.

   A connection can be cut at any time while an answer is awaited; the message is then lost, or left behind at the
   server, which may still do it, much later (`left behind`: one for each process, an older one is rolled back). A
   process can be killed at any time. A crash of the server is that of all transactions that are open; what was
   acknowledged stays, as acquire and batches raise synchronous_commit.

   A fail-over goes back to what the whole database was at some earlier time, once: lease, watermark, runs, source and
   data together. A restored backup and a crash with asynchronous commit are the same to the protocol. What was
   acknowledged since then is lost, which no client can prevent; that is no broken promise here, and what is built on
   it afterwards must be right.

   What is claimed

   1  Acknowledged writes stay in the data.
   2  Nothing is applied twice, and nothing up to the watermark is missing.
   3  Nobody commits who is not the holder, nor after his run was ended.
   4  Fences are in the order of the commits.
   5  An unknown COMMIT is resolved rightly, and what was called not committed never is.
   6  Whoever is granted the lease, and whoever commits, has a run that is `running` under its lease_id; no other has.
   7  A wake-up that found the job busy is not forgotten: some run looks after it, or one is asked for. A run that died
      counts here: it is `running` until the next one, or who watches, finds it dead, and that asks for another.

   What is not in here: more than one slot; pauses, deadlines and ticks; what is due (NewRows' horizon, claims); the
   protection of tables; how long anything takes, hence whether it ever ends; an old primary that still lives after a
   fail-over; and whether Postgres does what it says. The real SQL is tried in tests/evidence and tests/chaos.

   How large (all bounds; within them nothing is left out) */

#ifndef N
#define N 2                     /* processes: 2 or 3 */
#endif
#ifndef ROWS
#define ROWS 2                  /* rows of the source */
#endif
#ifndef WAKEUPS
#define WAKEUPS 2               /* runs that a process tries to begin */
#endif
#ifndef CUTS
#define CUTS 1                  /* answers that one process can lose to a cut connection, fail-overs not counted */
#endif
#ifndef FAILOVERS
#define FAILOVERS 1             /* 0 or 1 */
#endif
#ifndef RELEASES
#define RELEASES 0              /* `gaffer release`, by hand */
#endif

/* What a batch checks before it commits: the product's rule, and those that look as if they would do. */

#define FENCE_AND_ID 0          /* the product: fence and lease_id, the row locked FOR NO KEY UPDATE */
#define TIME_ONLY 1             /* the lease is not over; the row locked */
#define PLAIN_SELECT 2          /* fence and lease_id, no lock */
#define LOCKS_KEY_SHARE 3       /* fence and lease_id, the row locked FOR KEY SHARE */
#define NUMBER_ONLY 4           /* the fence; the row locked */
#ifndef RULE
#define RULE FENCE_AND_ID
#endif

/* What stands behind the check, and can save a wrong one. */

#ifndef WATERMARK
#define WATERMARK 1             /* the watermark is moved from where the batch found it, else refused */
#endif
#ifndef RUN_ROW
#define RUN_ROW 1               /* the run must be `running` under this lease_id */
#endif

/* What is done after a COMMIT whose answer was lost. */

#define SUPERSEDES 0            /* the product: exchanges (fence, lease_id), then looks at its run */
#define LOOKS 1                 /* only looks */
#define BELIEVES_NO 2           /* takes it for not committed */
#define BELIEVES_YES 3          /* takes it for committed */
#ifndef UNKNOWN
#define UNKNOWN SUPERSEDES
#endif

/* What else the product does. That the end counts batches is what this model has taught it: a run that outlived a
   fail-over, and whose newest batch was lost by that, ended as if all were done, and what was lost waited for the next
   tick, unnoticed. */

#ifndef LOOKS_AGAIN
#define LOOKS_AGAIN 1           /* the end reads wanted_at */
#endif
#ifndef COUNTS
#define COUNTS 1                /* the end of a run that did all compares the number of its batches */
#endif
#ifndef CLEARS_ID
#define CLEARS_ID 1             /* the end clears lease_id */
#endif
#ifndef ABANDONS
#define ABANDONS 1              /* whoever takes the lease ends the run that died under it */
#endif

/* With ONLY_DATA only the damage counts (1 and 2), not that a rule was broken. */

#define CLAIM(that, words) if :: (that) :: else -> printf(words); assert(false) fi
#ifdef ONLY_DATA
#define CLAIM_RULE(that, words) skip
#else
#define CLAIM_RULE(that, words) CLAIM(that, words)
#endif

/* ── the database ────────────────────────────────────────────────────────────────────────────────────────────── */

#define NONE 0                  /* no such run; no lease_id */
#define RUNNING 1
#define ENDED 2
#define ABANDONED 3             /* found dead by the next one, or released; by its own process: lost_lease */

typedef Run {
    byte outcome;
    byte lease_id;
    byte batches
}

typedef Database {
    byte fence;
    byte lease_id;
    byte watermark;
    byte due;                   /* rows in the source */
    byte wanted_at;             /* when the last wake-up found the job busy */
    bool owed;                  /* another run will be asked for: follow_up_at, or a tick that nobody covered */
    Run runs[N];                 /* the newest of each process */
    byte done_by[ROWS];         /* data: which process did row 1, 2, …; one more than its number */
    byte total;                 /* data: overwritten by each batch */
    byte last_fence;            /* (of the claims:) of the last commit */
    byte heard                  /* (of the claims:) rows due when the last wake-up went away */
}

Database db, standby;
Database nothing;
bool is_copied, is_over;        /* the standby is at some time; that was promoted */
byte clock;                     /* never goes back */
byte acknowledged;              /* (of the claims:) so many rows */
byte started;
byte releases = RELEASES;

#define IS_RUNNING(w) (db.runs[w].outcome == RUNNING)
#if N == 2
#define ONE_RUNS (IS_RUNNING(0) || IS_RUNNING(1))
#else
#define ONE_RUNS (IS_RUNNING(0) || IS_RUNNING(1) || IS_RUNNING(2))
#endif
#define IS_ITS_OWN(w) (IS_RUNNING(w) && db.runs[w].lease_id == db.lease_id)
#define ONLY_RUNS(w) (IS_ITS_OWN(w) && !IS_RUNNING((w + 1) % N) && !IS_RUNNING((w + N - 1) % N))

/* The locks that a transaction can have on a row; two conflict as in Postgres: where their numbers make more than 4. */

#define KEY_SHARE 1
#define SHARE 2
#define NO_KEY_UPDATE 3         /* every step of the protocol takes this one */
#define FOR_UPDATE 4

/* A connection, of which the server knows: what it was sent, and what it has locked of the lease. */

#define FREE 0                  /* nothing is under way; or it is cut */
#define SENT 1                  /* a batch's last message is on its way, or waits for the row */
#define CHECKED 2               /* its check has passed */
#define COMMITTED 3             /* the answer is on its way */
#define REFUSED 4               /* the answer is on its way */
#define ENDING 5                /* the end has locked the lease */
#define ASKING 6                /* a wake-up found the job busy, and will ask once more */

typedef Connection {
    byte at;
    byte lock;
    byte fence;
    byte lease_id;
    byte from;                  /* the row before that of the batch: its process's position */
    bool is_given_up            /* (of the claims:) its process was told that it is not committed, or has ended */
}

Connection line[2 * N];           /* of each process, and what it left behind */

#define BEHIND(w) (N + (w))
#if N == 2
#define CAN_LOCK(mode) (line[0].lock + mode <= 4 && line[1].lock + mode <= 4 && line[2].lock + mode <= 4 \
                        && line[3].lock + mode <= 4)
#else
#define CAN_LOCK(mode) (line[0].lock + mode <= 4 && line[1].lock + mode <= 4 && line[2].lock + mode <= 4 \
                        && line[3].lock + mode <= 4 && line[4].lock + mode <= 4 && line[5].lock + mode <= 4)
#endif

inline clear(c) {
    line[c].at = FREE; line[c].lock = 0; line[c].fence = 0; line[c].lease_id = 0; line[c].from = 0; line[c].is_given_up = false
}

/* ── the server does a batch's last message: commit_batch, COMMIT ────────────────────────────────────────────── */

#if RULE == PLAIN_SELECT
#define CHECK_LOCKS 0
#elif RULE == LOCKS_KEY_SHARE
#define CHECK_LOCKS KEY_SHARE
#else
#define CHECK_LOCKS NO_KEY_UPDATE
#endif

#if RULE == TIME_ONLY
#define PASSES(c) (db.lease_id != NONE)     /* whose lease it is that is not over, it does not ask */
#elif RULE == NUMBER_ONLY
#define PASSES(c) (db.fence == line[c].fence)
#else
#define PASSES(c) (db.fence == line[c].fence && db.lease_id == line[c].lease_id)
#endif

#define RUN_IS_RIGHT(w, c) (!RUN_ROW || (IS_RUNNING(w) && db.runs[w].lease_id == line[c].lease_id))
#define WATERMARK_IS_RIGHT(c) (!WATERMARK || db.watermark == line[c].from)

/* Of what was left behind nobody is there to hear. */

inline answer(c, word) {
    if :: c < N -> line[c].at = word :: else -> clear(c) fi
}

proctype Server(byte c; byte w) {
end:
    do
    :: d_step { line[c].at == SENT && CAN_LOCK(CHECK_LOCKS) ->
        if
        :: PASSES(c) ->
            line[c].at = CHECKED; line[c].lock = CHECK_LOCKS;
            printf("server: the check of process %d's batch passes (fence %d)\n", w, line[c].fence)
        :: else ->
            printf("server: the check of process %d's batch refuses it (fence %d, and it is %d)\n", w, line[c].fence, db.fence);
            answer(c, REFUSED)
        fi }
    :: d_step { line[c].at == CHECKED && (line[c].lock == NO_KEY_UPDATE || CAN_LOCK(NO_KEY_UPDATE)) ->
        line[c].lock = 0;
        if
        :: WATERMARK_IS_RIGHT(c) && RUN_IS_RIGHT(w, c) ->
            printf("server: COMMIT of process %d's batch of row %d (fence %d)\n", w, line[c].from + 1, line[c].fence);
            CLAIM(db.done_by[line[c].from] == 0, "BROKEN: that row is applied twice\n");
            db.done_by[line[c].from] = w + 1;
            db.total = line[c].from + 1;
            db.watermark = line[c].from + 1;
            if :: IS_RUNNING(w) -> db.runs[w].batches++ :: else fi;
            CLAIM(line[c].from == 0 || db.done_by[line[c].from - 1] != 0, "BROKEN: the row before it is missing, and the watermark is past it\n");
            CLAIM(db.total >= acknowledged, "BROKEN: what was acknowledged is overwritten\n");
            CLAIM_RULE(db.fence == line[c].fence && db.lease_id == line[c].lease_id, "BROKEN: a commit by one who is not the holder\n");
            CLAIM_RULE(!line[c].is_given_up, "BROKEN: a commit after its process was told that there is none, or its run was ended\n");
            CLAIM_RULE(ONLY_RUNS(w), "BROKEN: a commit while another run is running\n");
            CLAIM_RULE(db.last_fence <= line[c].fence, "BROKEN: a commit after one under a later fence\n");
            db.last_fence = line[c].fence;
            answer(c, COMMITTED)
        :: else ->
            printf("server: process %d's batch of row %d is refused, by the watermark or its run\n", w, line[c].from + 1);
            answer(c, REFUSED)
        fi }
    :: d_step { c >= N && (line[c].at == SENT || line[c].at == CHECKED) ->
        printf("server: the transaction that process %d left behind is rolled back\n", w);
        clear(c) }
    od
}

/* ── a process: one run after another ────────────────────────────────────────────────────────────────────────── */

/* What another run of this slot has left `running` is found dead by whoever takes the lease. */

inline abandon(new_id) {
    i = 0;
    do
    :: i < N ->
        if
        :: ABANDONS && IS_RUNNING(i) && db.runs[i].lease_id != new_id -> db.runs[i].outcome = ABANDONED; db.owed = true
        :: else
        fi;
        i++
    :: else -> break
    od;
    i = 0
}

/* The lease is had already by this lease_id (the answer was lost), free, or expired: the latter may be at any time. */

inline acquire() {
    d_step {
        if
        :: db.lease_id != lease_id -> db.fence++; db.lease_id = lease_id
        :: else
        fi;
        abandon(lease_id);
        if
        :: db.runs[w].lease_id != lease_id ->
            db.runs[w].lease_id = lease_id; db.runs[w].outcome = RUNNING; db.runs[w].batches = 0
        :: else
        fi;
        fence = db.fence; position = db.watermark; batches = db.runs[w].batches; wanted_at = db.wanted_at; rows = 0;
        clear(w);
        printf("process %d: has the lease: fence %d, lease_id %d, watermark %d\n", w, fence, lease_id, position);
        CLAIM_RULE(ONLY_RUNS(w), "BROKEN: the holder's run is not the one that is running\n")
    }
}

#define IS_SPENT (db.runs[w].lease_id == lease_id && !IS_RUNNING(w))     /* that run is over: refused */
#define IS_ANOTHERS (db.lease_id != NONE && db.lease_id != lease_id)
#define IS_HOLDER (db.fence == fence && db.lease_id == lease_id)
#define LOST_SOME (COUNTS && is_done && db.runs[w].batches != batches)
#define IS_FOLLOWED (ONE_RUNS || db.owed || db.watermark >= db.heard)

/* What the server has not answered is left behind: to be done when nobody listens any more, or to be rolled back. */

inline cut() {
    if
    :: line[w].at == SENT || line[w].at == CHECKED ->
        line[BEHIND(w)].at = line[w].at; line[BEHIND(w)].lock = line[w].lock; line[BEHIND(w)].fence = line[w].fence;
        line[BEHIND(w)].lease_id = line[w].lease_id; line[BEHIND(w)].from = line[w].from; line[BEHIND(w)].is_given_up = false
    :: else
    fi;
    clear(w)
}

/* It knows that its batch is committed. */

inline learns() {
    position++; batches++;
    printf("process %d: row %d is committed, it knows\n", w, position);
    if :: acknowledged < position -> acknowledged = position :: else fi;
    CLAIM(db.total >= acknowledged && db.done_by[position - 1] != 0, "BROKEN: what is acknowledged is not there\n")
}

/* What became of a COMMIT whose answer was lost. */

inline resolves(is_committed) {
    if
    :: is_committed ->
        CLAIM_RULE(db.done_by[position] == w + 1, "BROKEN: it is called committed, and is not\n");
        learns()
    :: else ->
        printf("process %d: its batch was not committed; does it again\n", w);
        CLAIM_RULE(db.done_by[position] != w + 1, "BROKEN: it is called not committed, and is\n");
        if :: line[BEHIND(w)].at != FREE -> line[BEHIND(w)].is_given_up = true :: else fi
    fi
}

proctype Worker(byte w) {
    byte wakeups = WAKEUPS, cuts = CUTS, made, i;
    byte fence, lease_id, new_id;
    byte position, batches;     /* as it knows them: from the grant, and its own commits */
    byte seen, wanted_at;       /* rows due at its last look; wanted_at before that */
    byte rows;                  /* due when it woke up */
    bool is_done;

idle:
end:
    /* Processes are alike, so that it says nothing new where a later one begins before an earlier one. */
    atomic { wakeups > 0 && w <= started ->
        wakeups--;
        if :: w == started -> started++ :: else fi;
        lease_id = 1 + w + N * made; made++;
        printf("process %d: wakes up, with lease_id %d\n", w, lease_id)
    }

asks:
    /* acquire, with `p_wait` 0: a lease that is locked by another is busy at once. */
    atomic {
        rows = db.due;
        if
        :: CAN_LOCK(NO_KEY_UPDATE) && IS_SPENT -> printf("process %d: its run is over\n", w); goto over
        :: CAN_LOCK(NO_KEY_UPDATE) && !IS_SPENT -> acquire(); goto leased
        :: !CAN_LOCK(NO_KEY_UPDATE) || IS_ANOTHERS ->
            clock++; db.wanted_at = clock; line[w].at = ASKING;
            printf("process %d: busy, says that it wants to (rows due: %d)\n", w, rows)
        fi
    }

    /* Once more, with a wait for who may just be ending. */
    atomic {
        if
        :: line[w].at == FREE -> goto asks        /* the connection was cut by a fail-over */
        :: line[w].at == ASKING && CAN_LOCK(NO_KEY_UPDATE) && IS_SPENT -> printf("process %d: its run is over\n", w); goto over
        :: line[w].at == ASKING && CAN_LOCK(NO_KEY_UPDATE) && !IS_SPENT -> acquire()
        :: line[w].at == ASKING && (!CAN_LOCK(NO_KEY_UPDATE) || IS_ANOTHERS) ->
            printf("process %d: still busy, goes away\n", w);
            if :: db.heard < rows -> db.heard = rows :: else fi;
            CLAIM_RULE(IS_FOLLOWED, "BROKEN: a wake-up is forgotten\n");
            goto over
        fi
    }

leased:
    atomic {
        if
        :: seen = db.due; printf("process %d: looks, and %d rows are there\n", w, seen)
        :: cuts > 0 -> cuts--; printf("process %d: did not hear that it has the lease\n", w); goto asks
        fi
    }

works:
    atomic {
        if
        :: position < seen ->
            line[w].at = SENT; line[w].fence = fence; line[w].lease_id = lease_id; line[w].from = position;
            printf("process %d: has done row %d, sends COMMIT (fence %d, lease_id %d)\n", w, position + 1, fence, lease_id)
        :: position >= seen -> is_done = true; goto ends
        :: printf("process %d: is told to stop\n", w); goto ends
        :: printf("process %d: is killed\n", w); goto over
        fi
    }

    atomic {
        if
        :: line[w].at == COMMITTED ->
            clear(w);
            learns();
            goto works
        :: line[w].at == REFUSED -> clear(w); printf("process %d: hears that it was refused\n", w); goto ends
        :: line[w].at == FREE -> printf("process %d: its connection is cut\n", w); goto unknown
        :: cuts > 0 -> cuts--; cut(); printf("process %d: its connection is cut\n", w); goto unknown
        :: printf("process %d: is told to stop within COMMIT\n", w); cut(); goto ends
        :: printf("process %d: is killed within COMMIT\n", w); cut(); goto over
        fi
    }

unknown:
#if UNKNOWN == SUPERSEDES
    atomic { new_id = 1 + w + N * made; made++ }
supersedes:
    /* Waits for whatever has locked the row. The same call again finds that it was done. */
    atomic {
        if
        :: CAN_LOCK(NO_KEY_UPDATE) && IS_HOLDER && IS_RUNNING(w) && db.runs[w].lease_id == lease_id ->
            db.fence++; db.lease_id = new_id; db.runs[w].lease_id = new_id;
            printf("process %d: takes the next fence, %d, lease_id %d\n", w, db.fence, new_id)
        :: CAN_LOCK(NO_KEY_UPDATE) && db.fence == fence + 1 && db.lease_id == new_id && IS_RUNNING(w) && db.runs[w].lease_id == new_id
        :: CAN_LOCK(NO_KEY_UPDATE) && !(IS_HOLDER && IS_RUNNING(w) && db.runs[w].lease_id == lease_id) &&
           !(db.fence == fence + 1 && db.lease_id == new_id && IS_RUNNING(w) && db.runs[w].lease_id == new_id) ->
            new_id = 0; printf("process %d: cannot take the next fence, the lease is lost\n", w); goto ends
        :: new_id = 0; printf("process %d: is killed\n", w); goto over
        fi;
        if
        :: fence = db.fence; lease_id = new_id; new_id = 0; resolves(db.runs[w].batches > batches); goto works
        :: printf("process %d: did not hear that it has\n", w); goto supersedes
        fi
    }
#elif UNKNOWN == LOOKS
    atomic { resolves(IS_RUNNING(w) && db.runs[w].lease_id == lease_id && db.runs[w].batches > batches) }
    goto works;
#else
    atomic { resolves(UNKNOWN == BELIEVES_YES) }
    goto works;
#endif

ends:
    /* end_run: locks the lease, if it is still its own. */
    atomic {
        CAN_LOCK(NO_KEY_UPDATE);
        if
        :: IS_HOLDER && IS_RUNNING(w) && db.runs[w].lease_id == lease_id -> line[w].at = ENDING; line[w].lock = NO_KEY_UPDATE
        :: IS_HOLDER && !(IS_RUNNING(w) && db.runs[w].lease_id == lease_id) -> goto over    /* refused */
        :: else ->
            if
            :: db.runs[w].lease_id == lease_id && db.runs[w].outcome == ENDED -> printf("process %d: its run was ended already\n", w)
            :: db.runs[w].lease_id == lease_id && db.runs[w].outcome != ENDED ->
                db.runs[w].outcome = ABANDONED; printf("process %d: ends, its lease is lost\n", w)
            :: else -> printf("process %d: ends, of its run nothing is left\n", w)
            fi;
            goto over
        fi
    }
    /* Then the job's row, and with it the wish of those who found the job busy. */
    atomic {
        if
        :: line[w].at == FREE -> goto ends        /* cut; asks again */
        :: line[w].at == ENDING && LOST_SOME ->
            is_done = false; clear(w);
            printf("process %d: is refused its end, as batches of its are lost\n", w); goto ends
        :: line[w].at == ENDING && !LOST_SOME && LOOKS_AGAIN && is_done && db.wanted_at != wanted_at ->
            wanted_at = db.wanted_at; is_done = false; clear(w);
            printf("process %d: is told to look again\n", w)
        :: line[w].at == ENDING && !LOST_SOME && !(LOOKS_AGAIN && is_done && db.wanted_at != wanted_at) ->
            clear(w);
            db.runs[w].outcome = ENDED;
            db.owed = !is_done;
            if :: CLEARS_ID -> db.lease_id = NONE :: else fi;
            if :: line[BEHIND(w)].at != FREE -> line[BEHIND(w)].is_given_up = true :: else fi;
            printf("process %d: its run has ended, all done: %d\n", w, is_done);
            CLAIM_RULE(IS_FOLLOWED, "BROKEN: a wake-up is forgotten\n");
            if
            :: goto over
            :: cuts > 0 -> cuts--; printf("process %d: did not hear that it has ended\n", w); goto ends
            fi
        fi
    }
    atomic { seen = db.due; printf("process %d: looks, and %d rows are there\n", w, seen); goto works }

over:
    atomic {
        if :: line[w].at != FREE -> clear(w) :: else fi;
        fence = 0; lease_id = 0; new_id = 0; position = 0; batches = 0; seen = 0; wanted_at = 0; rows = 0;
        is_done = false
    }
    goto idle
}

/* ── what happens by itself ──────────────────────────────────────────────────────────────────────────────────── */

inline copy(a, b) {
    a.fence = b.fence; a.lease_id = b.lease_id; a.watermark = b.watermark; a.due = b.due;
    a.wanted_at = b.wanted_at; a.owed = b.owed; a.total = b.total; a.last_fence = b.last_fence;
    a.heard = b.heard;
    i = 0;
    do
    :: i < N ->
        a.runs[i].outcome = b.runs[i].outcome; a.runs[i].lease_id = b.runs[i].lease_id;
        a.runs[i].batches = b.runs[i].batches; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < ROWS -> a.done_by[i] = b.done_by[i]; i++
    :: else -> break
    od;
    i = 0
}

proctype Fate() {
    byte i;
end:
    do
    :: d_step { db.due < ROWS -> db.due++; printf("a row is added: %d\n", db.due) }
    :: d_step { FAILOVERS && !is_copied -> copy(standby, db); is_copied = true; printf("the standby has all this, and stays behind\n") }
    :: d_step { is_copied && !is_over ->
        is_over = true;
        copy(db, standby);
        copy(standby, nothing);
        i = 0;
        do
        :: i < 2 * N ->
            if
            :: line[i].at == COMMITTED && i < N && db.done_by[line[i].from] == i + 1
            :: else -> clear(i)
            fi;
            i++
        :: else -> break
        od;
        i = 0;
        if :: acknowledged > db.total -> acknowledged = db.total :: else fi;
        printf("FAIL-OVER: the standby is promoted; fence %d, lease_id %d, watermark %d\n", db.fence, db.lease_id, db.watermark) }
    :: d_step { releases > 0 && db.lease_id != NONE && CAN_LOCK(NO_KEY_UPDATE) ->
        releases--;
        db.fence++; db.lease_id = NONE; abandon(NONE); db.owed = true;
        printf("somebody releases the lease by hand\n") }
    od
}

init {
    byte w;
    atomic {
        db.due = 1;
        do
        :: w < N -> run Worker(w); run Server(w, w); run Server(BEHIND(w), w); w++
        :: else -> break
        od;
        run Fate()
    }
}
