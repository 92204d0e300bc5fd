"""What a run costs in days and money."""

from dataclasses import dataclass

DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A whole run: days from first to last, hours of all its devices together, and money in the price's currency."""

    days: float
    device_hours: float
    cost: float


def bill_of(
    num_tokens: float, tokens_per_second: float, *, num_devices: int, hour_price: float, goodput: float = 1.0
) -> Bill:
    """Return what `num_tokens` cost on devices that are paid by the hour, used or not.

    `tokens_per_second` are of the whole cluster; `goodput` is the share of the time that moves the run on.
    """
    seconds = num_tokens / (tokens_per_second * goodput)
    hours = seconds / 3600 * num_devices
    return Bill(days=seconds / DAY, device_hours=hours, cost=hours * hour_price)
