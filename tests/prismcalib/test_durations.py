import pytest

from prismcalib.durations import format_ns, parse_ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("5ns", 5),
        ("500us", 500_000),
        ("500µs", 500_000),
        ("1.5 ms", 1_500_000),
        (" 2s ", 2 * 10**9),
    ],
)
def test_parse(text, ns):
    assert parse_ns(text) == ns


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "1.5.0ms", "5 minutes"])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="not a duration"):
        parse_ns(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.500 us"),
        (630_800_000, "630.800 ms"),
        (-1_500_000, "-1.500 ms"),
        (9_999_000_000, "9,999.000 ms"),
        (75_000_000_000, "75.000 s"),
    ],
)
def test_format(ns, text):
    assert format_ns(ns) == text


@pytest.mark.parametrize(
    "text",
    ["9" * 400 + "s", "99999999999s", "9223372036854775808ns"],
    ids=["long", "seconds", "one more"],
)
def test_what_64_bits_do_not_hold(text):
    with pytest.raises(ValueError, match="too long a duration") as caught:
        parse_ns(text)
    assert len(str(caught.value)) < 120


def test_no_digit_is_lost():
    assert parse_ns("9223372036854775807ns") == 2**63 - 1
