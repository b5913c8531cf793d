"""Is what is installed what was tried together? The doctor's finding on the lane, as a line of the preflight."""

from cogumi.forecast.preflight_report import Line
from cogumi.stack.installed import against_lane, distributions


def line() -> Line:
    (found,) = against_lane(distributions())
    said = f"{found.figure}; {found.cause}" if found.cause else found.figure
    return Line("stack", said, "green" if found.state == "ok" else "yellow", found.fix)
