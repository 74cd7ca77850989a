exec(open("/tmp/e6.py").read().split("# the table:")[0])
T = "tests/faults/test_silent.py"
cut(T, '''    rows = [line''', "\n\ndef gap(", '''    rows = re.findall(r"^\\| (?!fault )(.*) \\| (?!.*: exercise)(.*) \\| (.*) \\|$", PAGE, re.M)
    return {fault: found for fault, _, found in rows}
''')
