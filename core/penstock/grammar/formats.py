"""Formats of texts in JSON schemas: enforced formats with their expressions, and formats that restrict nothing.

An expression here is in the engine's form. It may allow less than its format, never more.
"""

from collections.abc import Mapping

ENGINE_FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uri"})
"""Those which the engine enforces itself."""
UNENFORCED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "relative-json-pointer"),
        *("uri-reference", "uri-template"),
    }
)
"""Those of the specification which nothing here enforces: a pattern beside them need not say the same."""
FREE_FORMATS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""Those which say what a text is for, and allow any."""
ENCODINGS = frozenset({"base64", "base64url"})
"""Those which are written with padding and without: a pattern beside them says how."""
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_COMMON_DAY = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = f"(?:{_YEAR}-(?:{_COMMON_DAY})|{_LEAP})"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[%s][0-9a-fA-F]{3}-[%s][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"


def _write_range(low: int, high: int) -> str:
    return f"(?:{'|'.join(map(str, range(low, high + 1)))})"


def _write_groups(most: int, *, exactly: bool = False) -> str:
    """Return the expression of at most, or of exactly, that many groups of an IPv6 address."""
    if most == 0:
        return ""
    group = "[0-9a-fA-F]{1,4}"
    return f"{group}(?::{group}){{{most - 1}}}" if exactly else f"(?:{group}(?::{group}){{0,{most - 1}}})?"


def _write_ipv4_network(num_bits: int) -> str:
    """Return the expression of the networks of one size: the bits behind their prefix are 0."""
    octets = [_OCTET] * (num_bits // 8)
    if num_bits % 8:
        octets.append(f"(?:{'|'.join(map(str, range(0, 256, 256 >> num_bits % 8)))})")
    return "\\.".join([*octets, "0", "0", "0", "0"][:4]) + f"/{num_bits}"


_IPV6 = "(?:{})".format(
    "|".join(
        [
            _write_groups(8, exactly=True),
            *(f"{_write_groups(left, exactly=True)}::{_write_groups(7 - left)}" for left in range(8)),
        ]
    )
)
_IPV4_INTERFACE = f"{_IPV4}(?:/{_write_range(0, 32)})?"
_IPV6_INTERFACE = f"{_IPV6}(?:/{_write_range(0, 128)})?"
_IPV4_NETWORK = f"(?:{_IPV4}|{'|'.join(map(_write_ipv4_network, range(33)))})"
# Of the networks within a group of 16 bits none, as which digits are 0 depends on how the group is written.
_IPV6_NETWORK = "(?:{})".format(
    "|".join(
        [
            f"{_IPV6}(?:/128)?",
            *(f"{_write_groups(left, exactly=True)}::/{_write_range(16 * left, 128)}" for left in range(8)),
        ]
    )
)
_COUNT = f"(?:[0-9]{{1,3}},?|[0-9],[1-9][0-9]{{1,2}}|{'|'.join(f'{low},[{low}-9]' for low in range(10))})"
_QUANTIFIER = f"(?:(?:[*+?]|\\{{{_COUNT}\\}})\\??)?"
_ESCAPE = "\\\\[dDwWsStnr^$.|?*+()\\[\\]{}/\\\\]"
_CLASS = f"\\[\\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;@#%!=/]|{_ESCAPE})+\\]"
_ATOM = f"(?:[A-Za-z0-9_ ,:;@#%&!=<>~`'\"/-]|{_ESCAPE}|{_CLASS}|\\.)"
_PIECES = f"(?:{_ATOM}{_QUANTIFIER}|[\\^$])*"
_GROUP = f"\\((?:\\?:)?{_PIECES}(?:\\|{_PIECES})*\\){_QUANTIFIER}"
_PIECES_WITH_GROUPS = f"(?:{_ATOM}{_QUANTIFIER}|[\\^$]|{_GROUP})*"
FORMAT_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[tT]{_TIME}$",),
    "hostname": (f"^{_LABEL}(?:\\.{_LABEL})*$", "^[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*$"),
    "uuid": (_UUID % ("0-9a-fA-F", "0-9a-fA-F"),),
    **{f"uuid{number}": (_UUID % (number, "89abAB"),) for number in range(1, 9)},
    "base64": ("^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",),
    "base64url": ("^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",),
    "fraction": ("^[+-]?[0-9]+(?:/0*[1-9][0-9]*)?$",),
    "ipv4interface": (f"^{_IPV4_INTERFACE}$",),
    "ipv4network": (f"^{_IPV4_NETWORK}$",),
    "ipv6interface": (f"^{_IPV6_INTERFACE}$",),
    "ipv6network": (f"^{_IPV6_NETWORK}$",),
    "ipvanyaddress": (f"^(?:{_IPV4}|{_IPV6})$",),
    "ipvanyinterface": (f"^(?:{_IPV4_INTERFACE}|{_IPV6_INTERFACE})$",),
    "ipvanynetwork": (f"^(?:{_IPV4_NETWORK}|{_IPV6_NETWORK})$",),
    # Expressions that mean the same everywhere, without groups in groups.
    "regex": (f"^{_PIECES_WITH_GROUPS}(?:\\|{_PIECES_WITH_GROUPS})*$",),
}
"""A text that matches all expressions of a format has it. The engine does not know these formats, or also allows texts
that are not valid: 29 February in any year, leap seconds in any minute, and host names that are too long or have two
hyphens where an encoded name has them."""
MAX_HOSTNAME_CHARS = 253
