"""Resource quantities, as Kubernetes writes them."""

import re
from decimal import Decimal
from typing import Any

from agentjobs.domain.errors import InvalidSpecError

NUMBER = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,2})?")
SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def parse_quantity(value: Any) -> Decimal:
    """Return a quantity (`500m`, `4Gi`, `2`, `1e3`) as a number of base units.

    :raises InvalidSpecError: if it is none.
    """
    text = str(value)
    for length in (2, 1):
        factor = SUFFIXES.get(text[-length:]) if len(text) > length else None
        if factor is not None:
            text = text[:-length]
            break
    else:
        factor = Decimal(1)
    if not NUMBER.fullmatch(text):
        raise InvalidSpecError(f"{value!r} is not a quantity such as 500m, 4Gi or 2")
    return Decimal(text) * factor
