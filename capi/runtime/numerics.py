"""The number of this version's arithmetic: it rises when the same config, seed and data give other results.

It is written into run.json, for the run and for each start, and into the results of evaluations. Where it is missing
it is 1. A change of training that moves more than the last digits adds a line to `CHANGES`, which a resumed run shows;
one of evaluation raises the number too, so that a comparison does not reuse results of before.
"""

CHANGES = {
    # Before, the filter saw pixels outside of the crop, which changes what lies near its borders.
    2: "crops are cut before resizing",
    3: "the clustering adds up in another order",
    4: "targets are divided by their own sums, and the clustering adds up in another order once more",
    5: "on a GPU in bfloat16 the gradient of the prototypes is rounded to bfloat16 as well",
}
NUMERICS = max(CHANGES)


def changes_since(number: object) -> str:
    """What differs between `number` and this version, in words."""
    changes = [change for since, change in CHANGES.items() if not isinstance(number, int) or since > number]
    return "; ".join(changes) or "install the version that wrote it for the same numbers"
