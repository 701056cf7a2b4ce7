"""Contracts that third parties can check on entries of their own; our tests run them over every row of the tables.

A plug-in adds a row to a table through an entry point; one test per row is then enough:

    from orthomerge.testing import check_aligner
    from my_package import ROW

    def test_contracts() -> None:
        check_aligner(ROW)

- `check_method(row, options)`: data-free merging methods, rows of `orthomerge.merging.methods`.
- `check_fitted_method(row, options)`: methods that are fitted to inputs, rows of the same table.
- `check_aligner(row, options)`: aligners, rows of `orthomerge.alignment.aligners`.
- `check_protocol(row, options)`: evaluation protocols, rows of `orthomerge.evaluation.protocols`.

Each raises an AssertionError that names the row, its options and the broken contract. `options` are added to the
`quick` options of the row. `toys` and `settings` make the inputs of the checks; plug-ins may use them in other tests.
"""

from orthomerge.testing.aligners import check_aligner as check_aligner
from orthomerge.testing.fitted import check_fitted_method as check_fitted_method
from orthomerge.testing.methods import check_method as check_method
from orthomerge.testing.protocols import check_protocol as check_protocol
