"""Who sends which part of the vector to whom, so that everybody gets the average of all. Pure.

Follows from the group's table alone, so all members find the same. The vector is cut into parts,
and the table into sections (`dipaco.modules.outer.sections`). For each section and part there is a
*reducer*: it gets the contributions of the section's members to that part and sums them. For each
part one of its reducers is the *root*: it gets the sums of the other sections, adds them in order
and encodes the average, which goes back the same way. With one section the reducer is the root,
and that is the ordinary butterfly.

A member's partners are those of its section, and those that reduce the same parts for other
sections: with 1,000 members about 80, in place of 999.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dipaco.modules.codecs import Codec
from dipaco.modules.outer import sections

FP32_BYTES = 4


@dataclass(frozen=True)
class Topology:
    """Members are named by their places in the group."""

    sections: tuple[tuple[int, ...], ...]
    """The members of each section, in the order of summation."""
    reducers: tuple[tuple[int, ...], ...]
    """For each section and part, who sums the section's contributions to the part."""

    @classmethod
    def of(
        cls,
        order: Sequence[int],
        shares: Sequence[int],
        part_sizes: Sequence[int],
        section_rows: int,
    ) -> Topology:
        """Return the topology of a group.

        :param order: the members in the order of the canonical table
        :param shares: of the vector, that each member reduces; only their ratio counts
        :param part_sizes: elements of each part
        :param section_rows: members of a section at most

        The members stand in a line, those of a section together, each as wide as its share. The
        line is cut into as many equal pieces as there are sections, and who stands on the piece
        of a section reduces for it: with equal shares its own members. Where few can be reached
        they reduce for their neighbours too.
        """
        parted = tuple(
            tuple(order[row] for row in section) for section in sections(len(order), section_rows)
        )
        line = [member for section in parted for member in sorted(section)]
        ends = [len(parted) * end for end in accumulate(shares[member] for member in line)]
        begins = [0, *ends[:-1]]
        piece = ends[-1] // len(parted)
        reducers = []
        for number in range(len(parted)):
            low, high = number * piece, (number + 1) * piece
            widths = [
                max(0, min(end, high) - max(begin, low))
                for begin, end in zip(begins, ends, strict=True)
            ]
            reducers.append(tuple(line[place] for place in deal(part_sizes, widths)))
        return cls(parted, tuple(reducers))

    @cached_property
    def section_of(self) -> dict[int, int]:
        """The section that each member is in."""
        return {m: number for number, members in enumerate(self.sections) for m in members}

    def root_section(self, part: int) -> int:
        """Return the section whose reducer of a part is its root."""
        return part % len(self.sections)

    def root(self, part: int) -> int:
        """Return who adds the sections' sums of a part and encodes the average."""
        return self.reducers[self.root_section(part)][part]

    def parts_reduced_by(self, member: int, section: int) -> tuple[int, ...]:
        """Return the parts that a member reduces for a section, in order."""
        reducers = self.reducers[section]
        return tuple(part for part, reducer in enumerate(reducers) if reducer == member)

    def sections_reduced_by(self, member: int) -> tuple[int, ...]:
        """Return the sections that a member reduces anything for."""
        return tuple(n for n, reducers in enumerate(self.reducers) if member in reducers)

    def bytes_sent_by(self, member: int, part_sizes: Sequence[int], codec: Codec) -> int:
        """Return about how many bytes a member sends in all.

        Contributions to others, the averages of what it reduces to the section's others, its sums
        to the roots, and as a root the average to each reducer that sent one.
        """
        own = self.section_of[member]
        encoded, in_fp32 = 0, 0
        for part, size in enumerate(part_sizes):
            root = self.root(part)
            for section, members in enumerate(self.sections):
                reducer = self.reducers[section][part]
                if reducer == member:
                    encoded += size * sum(other != member for other in members)
                    in_fp32 += size * (root != member)
                elif section == own:
                    encoded += size
                if root == member:
                    encoded += size * (reducer != member)
        return codec.encoded_bytes(encoded) + FP32_BYTES * in_fp32

    def seconds_needed(
        self, mbit_per_s: Sequence[int], part_sizes: Sequence[int], codec: Codec
    ) -> float:
        """Return what the slowest line takes for what its member sends; lines of 0 are unknown."""
        slowest = min((rate for rate in mbit_per_s if rate > 0), default=0)
        if not slowest:
            return 0.0
        sent = self.bytes_sent_by(list(mbit_per_s).index(slowest), part_sizes, codec)
        return 8e-6 * sent / slowest

    def sums_between(self, reducer: int, root: int) -> tuple[tuple[int, int], ...]:
        """Return the sums that a reducer owes a root, each as (part, section), in order."""
        return tuple(
            (part, section)
            for part in range(len(self.reducers[0]))
            if self.root(part) == root
            for section in range(len(self.sections))
            if self.reducers[section][part] == reducer
        )


def deal(part_sizes: Sequence[int], shares: Sequence[int]) -> tuple[int, ...]:
    """Return for each part whose it is, so that everybody has about its share of the elements.

    Each member has a range of the vector, one after the other. A part that lies in several ranges
    goes to the member of whose range it covers most, of equals to the first. As Hivemind deals.
    """
    size, total = sum(part_sizes), sum(shares)
    ends = [size * end // total for end in accumulate(shares)]
    dealt, member, begin = [], 0, 0
    for part_size in part_sizes:
        end = begin + part_size
        first, covered = member, [min(end, ends[member]) - begin]
        while end > ends[member]:
            member += 1
            covered.append(min(end, ends[member]) - ends[member - 1])
        dealt.append(first + covered.index(max(covered)))
        begin = end
    return tuple(dealt)
