"""Formats of JSON Schema that are kept to, as regexes.

Each one allows what a checker of the format accepts, in its usual spelling; not every odd but
correct spelling is in it.
"""

from __future__ import annotations

_YEAR = r"000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3}"
_LEAP = r"\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00"
_DATE = (
    rf"(({_YEAR})-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    rf"|02-(0[1-9]|1\d|2[0-8]))|({_LEAP})-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*"
_URI = rf"[a-z][a-z0-9+.-]{{0,15}}://{_HOST}(:[1-9]\d{{0,3}})?(/{_PATH})?(\?{_PATH})?(#{_PATH})?"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}W|\d{1,4}D(T\d{1,4}H)?|T(\d{1,4}H)?\d{1,4}M|T\d{1,4}[HS])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}\.[A-Za-z]{{2,10}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uri": _URI,
}
