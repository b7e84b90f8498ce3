"""Strings on which byte-pair encoders are known to differ, for the gate.

Each line is here because some library got it wrong or because a rule of Unicode, of a pre-tokenizer's pattern or of a cache
changes there: normalisation forms, joined emoji, runs of blanks, contractions, digits in groups, control characters,
words longer than any cache entry, and text that spells special tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

FIXED: Final = (
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "\n",
    "\r\n",
    "a\r\nb\rc\n\n\nd",
    "\t\tif x:\n\t\t\treturn  y\n\n",
    " \n \n  x  \n",
    "word\u00a0nbsp\u2003em\u3000ideographic\u200bzero\ufeffbom\u2028line\u2029paragraph\u0085nel",
    "I'm you're he'll they've we'd it's I'M YOU'RE HE'LL THEY'VE WE'D IT'S don't DON'T 'tis 's 'S \u2019s",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 1e-9 \u0661\u0662\u0663 \u2460 \u00bd \u2167",
    "caf\u00e9 cafe\u0301 \u212b \u00c5 A\u030a \ufb01 fi \u1e9b\u0323 \ud55c\uae00 \u1112\u1161\u11ab \uff21\uff22\uff11",
    "\u0301leading mark, q\u0307\u0323 and q\u0323\u0307 order",
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 "
        "\U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f 1\ufe0f\u20e3"
    ),
    (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3067"
        "\u3059\u3002\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8 \U00020000\U0002a6d6"
    ),
    (
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 "
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u202eabc\u202c "
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    ),
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442 \u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 "
        "\u0130stanbul \u0131 \u00df \u1e9e \u01c5 \u01f0 \u0149"
    ),
    "\x00 a\x00b \x01\x02\x1b[0m \x7f \x80 \x9f \ufffd \ufffe \uffff \U0010ffff \ue000",
    "def f(x):\n    return {'a': [1, 2.5e3], \"b\": x**2}  # comment\n\n\n\nclass A:\n\tpass\n",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.com C:\\dir\\file.txt $HOME/.x/../y",
    "!!!??? ... --- ___ === +++ /// \\\\\\ ''' \"\"\" ``` ((([[[{{{<<<>>>}}}]]]))) ~@#$%^&*",
    "CamelCaseWords snake_case_words SCREAMING_CASE mixedUP123abc abc123DEF x1y2z3 iOS macOS",
    "\u2581 \u2581word \u0120 \u0120word \u010a \u00e2\u0122\u00ac <0x0A> <0x00> </w> ## ##ing @@ _",
    "<s> </s> <unk> <pad> <bos> <eos> <mask> [CLS] [SEP] [INST] <|endoftext|> <|im_start|>user<|im_end|> <|fim_prefix|>",
    "a<|endoftext|>b <|endoftext|>\n<|endoftext|><|endoftext|>",
    "\u00ad soft\u00adhyphen a\u034fb \u061c \u180e \u2060word\u2060 \U000e0001",
    "x" * 3000,
    "ab" * 1500 + " " + "0" * 700 + " " + "\u00e9" * 700 + " " + "\u4e2d" * 700,
    "=" * 300 + "\n" + "-" * 257 + "\n" + " " * 517 + "x" + "\n" * 130 + "\t" * 65,
    "\U0001f600" * 200 + "\u0301" * 200,
)


MARKS: Final = (
    "0300-036f 0483-0487 0591-05c7 0610-061a 064b-0670 06d6-06ed 0711-074a 07eb-07fd 0816-082d 0859-085b 0897-089f \
08ca-08ff 093c-0954 09bc-09fe 0a3c-0a4d 0abc-0acd 0b3c-0b4d 0bcd 0c3c-0c56 0cbc-0ccd 0d3b-0d4d 0dca 0e38-0e4b 0eb8-0ecb \
0f18-0fc6 1037-103a 108d 135d-135f 1714-1734 17d2-17dd 18a9 1939-193b 1a17-1a7f 1ab0-1aeb 1b34-1b73 1baa-1bf3 1c37 1cd0-1cf9 \
1dc0-1dff 20d0-20f0 2cef-2cf1 2d7f-2dff 302a-302f 3099-309a a66f-a69f a6f0-a6f1 a806-a82c a8c4-a8f1 a92b-a953 a9b3-a9c0 \
aab0-aaf6 abed fb1e fe20-fe2f 101fd 102e0 10376-1037a 10a0d-10a3f 10ae5-10ae6 10d24-10d27 10d69-10d6d 10eab-10eac 10efa-10eff \
10f46-10f50 10f82-10f85 11046-1107f 110b9-110ba 11100-11173 111c0-111ca 11235-112ea 1133b-11374 113ce-113e2 11442-1145e \
114c2-115c0 1163f-1172b 11839-11943 119e0 11a34-11a99 11c3f 11d42-11d97 11f41-11f42 1612f 16af0-16b36 16ff0-16ff1 1bc9e \
1d165-1d1ad 1d242-1d244 1e000-1e02a 1e08f 1e130-1e2ef 1e4ec-1e6ff 1e8d0-1e94a"
)
"""Where characters that combine live, up to Unicode 17: libraries disagree on the order and composition of the newest."""


RECENT: Final = (
    "061d 0870-0897 08b5 08c8-08d3 0c3c 0c5c-0c5d 0cdc-0cdd 0cf3 0ece 170d 1715 171f 180f 1ac1-1aeb 1b4c-1b4e \
1b7d-1b7f 1c89-1c8a 1dfa 20c0-20c1 2427-2429 2c2f 2c5f 2e53-2e5d 2ffc-2fff 31e4-31ef 9ffd-9fff a7c0-a7dc a7f1-a7f4 fbc2 \
fd40-fd4f fdcf fdfe-fdff 10570-105fc 10780-107ba 10940-10959 10d40-10d8f 10ec2-10eff 10f70-10f89 11070-11075 110c2 1123f-11241 \
11380-113e2 116b9 116d0-116e3 1171a-11746 11ab0-11abf 11b00-11b67 11bc0-11bf9 11db0-11def 11f00-11f5a 12f90-12ff2 1342f-143fa \
16100-16139 16a70-16ac9 16d40-16d79 16ea0-16ed3 16ff4-16ff6 18cff 18d09-18df2 1aff0-1affe 1b11f-1b155 1cc00-1cfc3 1d2c0-1d2d3 \
1df00-1df2a 1e030-1e08f 1e290-1e2ae 1e4d0-1e4f9 1e5d0-1e5ff 1e6c0-1e6ff 1e7e0-1e7fe 1f6dc-1f6df 1f774-1f77f 1f7d9 1f7f0 \
1f8b2-1f8d8 1fa75-1faff 1fbf0-1fbfa 2b739-2b73f 31350-33479"
)
"""What Unicode 14 to 17 added: letters, digits and marks to a library with new tables, nothing to one with old ones."""


def recent() -> list[str]:
    """Characters of RECENT among letters, digits and blanks, a few to a text; long blocks by samples."""
    cases = [
        f"a{c} {c}b1{c}2{c}{c} " for block in _blocks(RECENT) for c in map(chr, block[:: max(len(block) // 128, 1)])
    ]
    return ["".join(cases[i : i + 60]) for i in range(0, len(cases), 60)]


def combining() -> list[str]:
    """Each character of MARKS between marks that sort before and after it, a few to a text."""
    cases = [f"a\u0301{chr(p)}\u0323 " for block in _blocks(MARKS) for p in block]
    return ["".join(cases[i : i + 60]) for i in range(0, len(cases), 60)]


def _blocks(spec: str) -> list[range]:
    return [range(int(a, 16), int(b or a, 16) + 1) for a, _, b in (part.partition("-") for part in spec.split())]


def hard_strings(added_tokens: Iterable[str] = (), normalizes: bool = False) -> list[str]:
    """The fixed strings, words of no language, and each of the tokenizer's added tokens inside text (up to 64 of them).

    `normalizes`: also every character on which normal forms depend.
    """
    draw = random.Random(20_240_601)
    letters = "etaoinshrdluETAOIN0123456789 \u00e9\u00fc\u00f1\u4e2d\u6587'.,-_/\n"
    noise = ["".join(draw.choices(letters, k=length)) for length in (7, 40, 40, 200, 200, 1000)]
    points = "".join(chr(p) for p in draw.sample(range(1, 0xD7FF), 1500)) + "".join(
        chr(p) for p in draw.sample(range(0xE000, 0x1FFFF), 1500)
    )
    spelled = [f"a {t} b{t}c\n{t}{t} {t}" for t in list(added_tokens)[:64]]
    return [*FIXED, *noise, points, " ".join(points), *recent(), *spelled, *(combining() if normalizes else [])]
