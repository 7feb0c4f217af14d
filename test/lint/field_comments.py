#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""In headers, the comment of a field or declaration is above it. Behind it, a longer name would move the
whole column of comments, and a sentence would end with the line. An enum may have comments behind all its
enumerators, each on one line and in one column. Functions, tables of values and macros are not checked.

    field_comments.py ROOT         checks the tree's headers, prints FILE:LINE: what is wrong, exits 1 if anything is
    field_comments.py --self-test  checks the checker
"""
import os
import re
import sys

from tree_clean import tracked

HEADER = re.compile(r".*\.(h|cuh|hpp)$")
LEAST_HEADERS = 150  # with fewer, the search for headers is wrong
TOKEN = re.compile(r"""(?P<comment>/\*.*?\*/|//[^\n]*)
                     | (?P<macro>^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
                     | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
                     | (?P<brace>[{}])
                     | (?P<line>\n)
                     | (?P<space>[^\S\n]+)
                     | (?P<code>[^\s{};"'/]+|.)""", re.DOTALL | re.MULTILINE | re.VERBOSE)
FIELDS, ENUM, CODE = range(3)


class Comment:
    def __init__(self, text, match, is_behind):
        self.at, self.is_behind = match.start(), is_behind
        self.line = text.count("\n", 0, self.at) + 1
        self.column = self.at - (text.rfind("\n", 0, self.at) + 1)
        self.is_short = "\n" not in match[0] and not text[match.end():].split("\n", 1)[0].strip()


def scope_of(head, around):
    """Returns what kind of thing the braces after head hold. head is the text since the last statement, with
    empty strings."""
    if around != FIELDS or head.endswith("="):
        return CODE
    if re.match(r'extern\s*""$|namespace\b', head):
        return FIELDS
    keyword = re.search(r"\b(struct|union|enum)\b", head)
    is_function = head.endswith(")") and not re.search(r"__attribute__\s*\(\(.*\)\)$|\b_?[aA]lignas\s*\(.*\)$", head)
    if not keyword or is_function:
        return CODE
    return ENUM if keyword[1] == "enum" else FIELDS


def comments(text):
    """Yields (scope, number of the scope, comment) for each comment, or None if the braces do not match."""
    scopes, head, has_code, n_scopes = [(FIELDS, 0)], "", False, 0
    for token in TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "comment":
            yield *scopes[-1], Comment(text, token, has_code)
            has_code = has_code and "\n" not in token[0]
        elif kind == "line":
            has_code, head = False, head + " "
        elif kind == "space":
            head += " "
        elif token[0] == "{":
            n_scopes += 1
            scopes.append((scope_of(head.strip(), scopes[-1][0]), n_scopes))
            head, has_code = "", True
        elif token[0] == "}":
            if len(scopes) == 1:
                break
            scopes.pop()
            head = ""
        elif kind != "macro":
            head = "" if token[0] == ";" else head + ('""' if kind == "string" else token[0])
            has_code = True
    else:
        if len(scopes) == 1:
            return
    yield None


def is_column(of_enum):
    return all(c.is_behind and c.is_short for c in of_enum) and len({c.column for c in of_enum}) == 1


def faults_of(path, text):
    found = list(comments(text))
    if None in found:
        yield f"{path}:1: its braces do not pair, so its comments cannot be looked at"
        return
    enums = {}
    for scope, number, comment in found:
        if scope == FIELDS and comment.is_behind:
            yield f"{path}:{comment.line}: the comment belongs above what it is of"
        elif scope == ENUM:
            enums.setdefault(number, []).append(comment)
    for of_enum in enums.values():
        if not is_column(of_enum):
            yield from (f"{path}:{c.line}: the comments of this enum are no column of short ones, so this belongs above its enumerator"
                        for c in of_enum if c.is_behind)


def check(root):
    headers = [path for path in tracked(root) if HEADER.match(path)]
    if len(headers) < LEAST_HEADERS:
        yield f"test/lint/field_comments.py:1: found {len(headers)} headers, expected at least {LEAST_HEADERS}"
    for path in headers:
        with open(os.path.join(root, path), encoding="utf-8") as f:
            yield from faults_of(path, f.read())


def self_test():
    bad = (
        "struct a {\n    int b; /* c */\n};\n", "struct a {\n    int b; // c\n};\n", "union a { /* b */\n    int c;\n};\n",
        "struct a {\n    struct {\n        int b; /* c\n                * d */\n    } e;\n};\n", "struct a {\n    int b;\n} c; /* d */\n",
        "struct a {\n    int (*f)(int b, /* c */\n             int d);\n};\n", "int f(int a); /* b */\n", "struct a; /* b */\n",
        "typedef struct {\n    int b; /* c */\n} a;\n", "struct __attribute__((packed)) a {\n    int b; /* c */\n};\n",
        'extern "C" {\nint a; /* b */\n}\n', "namespace {\nstruct a {\n    int b; /* c */\n};\n} // namespace\n",
        "#define A {\nstruct a {\n    int b; /* c */\n};\n", "static int f(void)\n{\n}\nint a; /* b */\n", "int a[] = {1}; /* b */\n",
        "enum a { B, /* c */ D };\n", "enum a {\n    /* b */\n    B,\n    C, /* d */\n};\n", "enum a {\n    B, /* c\n        * d */\n};\n",
        "struct a {\n    int b;\n",
    )
    good = (
        "/* a */\nstruct a {\n    /* b */\n    int b;\n    int c;\n};\n", "enum a {\n    B,  /* b */\n    CC, /* c */\n    D\n};\n",
        "enum a {\n    /* b */\n    B\n};\n", "static int f(void)\n{\n    int a; /* b */\n    return a;\n}\n", "#define A 1 /* b */\n",
        "struct a {\n#define X(b) int b; /* c */\n    int d;\n};\n", "static const int a[] = {\n    1, /* b */\n};\n", "namespace {\n} // namespace\n",
        "struct a f(void)\n{\n    int b; /* c */\n}\n", 'static const char *a = "int b; /* c */";\n', "#endif /* A */\n",
    )
    failures = [f"{text!r}: {list(faults_of('x.h', text))}" for text in bad if len(list(faults_of("x.h", text))) != 1]
    failures += [f"{text!r}: refused" for text in good if list(faults_of("x.h", text))]
    behind = "struct a {\n    int b;\n    int c; /* d */\n};\n"
    if list(faults_of("x.h", behind)) != ["x.h:3: the comment belongs above what it is of"]:
        failures.append("the line is not told right")
    if len(list(faults_of("x.h", "enum a {\n    B, /* b */\n    CC, /* c */\n};\n"))) != 2:
        failures.append("two columns in an enum are not refused")
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else list(check(sys.argv[1]))
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
