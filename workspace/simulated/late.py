"""The report of a late access: through a tensor of a lease whose bytes somebody else has had since."""

from __future__ import annotations

import attrs

from workspace.simulated.race import Access


@attrs.define
class LateAccess:
    """An access that may well be ordered, and is to bytes of another lease all the same.

    Attributes
    ----------
    access
        It, with whom the bytes belong to now as its owner.
    lease, lease_site
        Owner of the lease that the tensor is of, and where that was acquired.
    since, since_site
        Who was lent the bytes first after it, and where.
    count
        How often one of the same label, stream and owners was found.
    """

    access: Access
    lease: str
    lease_site: tuple[str, ...]
    since: str
    since_site: tuple[str, ...]
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        lines = [
            f"late access{times}\n  {self.access}",
            f"  by a tensor of an earlier lease of {self.lease}, acquired at",
            *(f"    {frame}" for frame in self.lease_site),
            f"  whose bytes were lent to {self.since} since, at",
            *(f"    {frame}" for frame in self.since_site),
        ]
        if not self.access.site:
            lines = [line.removesuffix(", acquired at").removesuffix(", at") for line in lines]
            lines.append("  for call sites: simulated.Device(..., sites=True)")
        return "\n".join(lines)
