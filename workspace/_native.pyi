from collections.abc import Iterable
from typing import Any

def bind(given: dict[str, Any], inlined: Iterable[tuple[type, str]], /) -> dict[tuple[type, str], Any]: ...
