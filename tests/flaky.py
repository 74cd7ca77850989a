"""Compare two runs of the tests: what failed, and of that what passed when it was run once more.

Usage: python tests/flaky.py FIRST.xml STATUS SECOND.xml STATUS

The files are written by pytest --junit-xml, and STATUS is what pytest ended with. The second run
was of what failed in the first, with --last-failed. Each test that failed and then passed is flaky
and gets a line of its own. The exit status is 0 if nothing else failed, and fewer than 3 were
flaky; otherwise it is 1.
"""

import sys
import xml.etree.ElementTree as ET

LIMIT = 3  # so many flaky tests are too many
WELL = {0: "all passed", 1: "some failed", 5: "there was none"}  # what pytest ends with


def results_of(file):
    """Return {name of a test: "passed", "skipped" or "failed"} of a JUnit file.

    An error while a test is set up or taken down is a failure too, and so is a file that cannot be
    imported. Raises OSError or ET.ParseError where there is no such file, or half of one.
    """
    results = {}
    for case in ET.parse(file).iter("testcase"):
        module, name = case.get("classname"), case.get("name")
        name = f"{module.replace('.', '/')}.py::{name}" if module else name
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "passed"
        if result == "passed" and "skipped" in kinds:
            result = "skipped"
        if results.get(name) != "failed":  # a test that fails only at its end is there twice
            results[name] = result
    return results


def compare(first, second):
    """Return the names of the tests that failed for good, and of those that are flaky.

    Whatever failed first and did not pass afterwards has failed, also if it was skipped then or did
    not run; and so has what fails in the second run only.
    """
    failed_first = [name for name, result in first.items() if result == "failed"]
    flaky = [name for name in failed_first if second.get(name) == "passed"]
    failed = [name for name in failed_first if name not in flaky]
    failed += [name for name, x in second.items() if x == "failed" and name not in failed]
    return failed, flaky


def main():
    """Print a line for each test that failed or is flaky; return the exit status."""
    if len(sys.argv) != 5:
        sys.exit("Usage: python tests/flaky.py FIRST.xml STATUS SECOND.xml STATUS")
    first, first_status, second, second_status = sys.argv[1:]
    try:
        failed, flaky = compare(results_of(first), results_of(second))
    except (OSError, ET.ParseError) as error:
        sys.exit(f"A run of the tests has left no results: {error}")
    for name in failed:
        print(f"failed: {name}")
    for name in flaky:
        print(f"flaky: {name} failed, and passed when it was run once more")
    for status in (first_status, second_status):
        if int(status) not in WELL:
            sys.exit(f"A run of the tests ended in the middle, with exit status {status}.")
    if not failed and not flaky:  # the second run is there because the first one ended badly
        sys.exit("The tests ended badly, although none of them failed.")
    if len(flaky) >= LIMIT:
        print(f"{len(flaky)} tests are flaky: too many.")
    return 1 if failed or len(flaky) >= LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
