"""The sentence for a schedule: a table that was read by people, and no sentence for two meanings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from random import Random

import pytest

from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.words import words

SENTENCES = [
    ("* * * * *", "Every minute"),
    ("*/15 * * * *", "Every 15 minutes"),
    ("5/15 * * * *", "Every 15 minutes from minute 5 on"),
    ("*/7 * * * *", "At minutes 0, 7, 14, … 56 of every hour"),
    ("0,30 * * * *", "Every 30 minutes"),
    ("5 * * * *", "Every hour, at minute 5"),
    ("0 * * * *", "Every hour"),
    ("1-3 * * * *", "At minutes 1 to 3 of every hour"),
    ("0-58/2 * * * *", "Every 2 minutes"),
    ("0 6 * * *", "At 06:00 every day"),
    ("0 6,18 * * *", "At 06:00 and 18:00 every day"),
    ("0 */2 * * *", "Every 2 hours from 00:00 to 22:00 every day"),
    ("1 */2 * * *", "Every 2 hours from 00:01 to 22:01 every day"),
    ("0 */5 * * *", "Every 5 hours from 00:00 to 20:00 every day"),
    ("0 0-23 * * *", "Every hour"),
    ("* 6 * * *", "Every minute from 06:00 to 06:59 every day"),
    ("* */6 * * *", "Every minute of the hours 0, 6, 12 and 18 every day"),
    ("* 8-10,20 * * *", "Every minute of the hours 8 to 10 and 20 every day"),
    ("*/15 8-17 * * *", "Every 15 minutes from 08:00 to 17:45 every day"),
    ("5,10 8,12,17 * * *", "At 08:05, 08:10, 12:05, 12:10, 17:05 and 17:10 every day"),
    ("5,10 8,12,17,19 * * *", "At minutes 5 and 10 of the hours 8, 12, 17 and 19 every day"),
    ("0 22-2 * * *", "At 00:00, 01:00, 02:00, 22:00 and 23:00 every day"),
    ("0 20-4/3 * * *", "At 02:00, 20:00 and 23:00 every day"),
    ("0 6 * * MON-FRI", "At 06:00 on Monday to Friday"),
    ("0 6 * * 1,3,5", "At 06:00 on Monday, Wednesday and Friday"),
    ("0 6 * * FRI-MON", "At 06:00 on Monday and Friday to Sunday"),
    ("0 6 * * 7", "At 06:00 on Sunday"),
    ("0 6 * * 0-7", "At 06:00 on Monday to Sunday"),
    ("0 6 * * 6,0", "At 06:00 on Saturday and Sunday"),
    ("0 6 1 * *", "At 06:00 on day 1 of the month"),
    ("0 6 1,15 * *", "At 06:00 on days 1 and 15 of the month"),
    ("0 6 L * *", "At 06:00 on the last day of the month"),
    ("0 6 1,L * *", "At 06:00 on day 1 and the last day of the month"),
    ("0 6 */2 * *", "At 06:00 on days 1, 3, 5, … 31 of the month"),
    ("0 6 31 * *", "At 06:00 on day 31 of the month"),
    ("0 6 29 2 *", "At 06:00 on day 29 of February"),
    ("0 6 1 1,7 *", "At 06:00 on day 1 of January and July"),
    ("0 6 * JUN-AUG *", "At 06:00 every day of June to August"),
    ("0 6 * NOV-FEB *", "At 06:00 every day of January, February, November and December"),
    ("30 0 1 * 1", "At 00:30 on day 1 of the month or on Monday"),
    ("30 0 1 1 1", "At 00:30 on day 1 of January or on Monday in January"),
    ("0 0 */2 * 1", "At 00:00 on days 1, 3, 5, … 31 of the month or on Monday"),
    ("0 6 * * L5", "At 06:00 on the last Friday of the month"),
    ("0 6 * * 1#2", "At 06:00 on the second Monday of the month"),
    ("0 6 * * MON#1,MON#3", "At 06:00 on the first Monday and the third Monday of the month"),
    ("0 6 * * L5,1#2,0", "At 06:00 on Sunday or on the second Monday and the last Friday of the month"),
    ("0 6 * 1 L5", "At 06:00 on the last Friday of January"),
    ("*/15 * * * MON", "Every 15 minutes on Monday"),
    ("*/15 * * 1 *", "Every 15 minutes every day of January"),
    ("30 2-4 * * *", "Every hour from 02:30 to 04:30 every day"),
    ("0,59 0,23 * * *", "At 00:00, 00:59, 23:00 and 23:59 every day"),
    ("0 0 1-7 * FRI", "At 00:00 on days 1 to 7 of the month or on Friday"),
    ("0 0 31 * L5", "At 00:00 on day 31 of the month or on the last Friday of the month"),
    ("@hourly", "Every hour"),
    ("@yearly", "At 00:00 on day 1 of January"),
]


@pytest.mark.parametrize(("cron", "sentence"), SENTENCES)
def test_the_sentence_of_a_cron(cron: str, sentence: str) -> None:
    assert words(Schedule(cron)) == f"{sentence}, in UTC"


def test_several_crons_the_zone_and_the_policies_are_said() -> None:
    schedule = Schedule(["0 6 * * *", "30 12 * * SAT"], "America/New_York", missing_hour="skip", repeated_hour="first")
    assert words(schedule) == (
        "At 06:00 every day; and at 12:30 on Saturday, in America/New_York; what a change of the clock leaps over is "
        "left out; of an hour that comes twice the first counts"
    )


# Each field's ways to be written, near to one another, so that a careless phrase takes two of them for the same.
MINUTES = ["*", "0", "5", "*/7", "*/15", "5/15", "3/15", "0,30", "0,30,45", "1-3", "0-58/2", "1-59/2", "0-56/8", "0,59"]
HOURS = ["*", "0-22", "0", "6", "6,18", "*/2", "1/2", "0-20/2", "8-17", "20-4/3", "22-2", "*/6", "1,6,12,18", "0,23"]
MONTH_DAYS = ["*", "1", "L", "1,L", "1,31", "*/2", "1-7", "1-31", "1,15", "1-29/4"]
MONTHS = ["*", "1", "2", "1,7", "JUN-AUG", "NOV-FEB", "*/2", "1-9/2"]
WEEKDAYS = ["*", "0", "1", "1-5", "FRI-MON", "0-6", "L5", "1#1", "1#2", "1#1,1#2", "1,1#2", "6,0", "L0,0"]


def confused(describe: Callable[[Schedule], str], seed: int, count: int = 1500) -> list[set[str]]:
    """Crons that differ in meaning and read the same."""
    print(f"seed {seed}")
    random = Random(seed)
    fields = (MINUTES, HOURS, MONTH_DAYS, MONTHS, WEEKDAYS)
    meanings: dict[str, dict[object, str]] = defaultdict(dict)
    for _ in range(count):
        # Two fields vary, so that neighbours meet.
        chosen = [random.choice(field) if random.random() < 0.4 else field[0] for field in fields]
        schedule = Schedule(" ".join(chosen))
        (line,) = schedule.lines
        meaning = (line.times, line.months, line.month_days, line.weekdays)
        meanings[describe(schedule)].setdefault(meaning, line.text)
    return [set(texts.values()) for texts in meanings.values() if len(texts) > 1]


def test_no_two_meanings_read_the_same() -> None:
    assert confused(words, seed=20261129, count=4000) == []


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("first|second|third", "next"),
        (r" to \d\d:\d\d", ""),
        (r", … \d+", " and so on"),
        (r"from minute \d+ on", ""),
        (" or on .*", ""),
    ],
)
def test_a_careless_sentence_is_found(part: str, instead: str) -> None:
    assert confused(lambda schedule: re.sub(part, instead, words(schedule)), seed=20261129) != []
