"""Languages of multilingual translators: their codes, and the choice of a pair."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from regard.errors import ArgumentError


def _codes(text: str) -> list[str]:
    return text.split()


_MAX_LISTED = 8  # maximum number of codes in an error message
_WELL_KNOWN = _codes("ar arb cs ces de deu en eng es spa fr fra hi hin it ita ja jpn pt por ru rus zh zho")
# for folders that do not list their languages: the order of the language tokens after the vocabulary
M2M_100 = _codes(
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi "
    "hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns "
    "oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh "
    "zu"
)
WMT_21 = _codes("en ha is ja cs ru zh de")
MBART_25 = _codes(
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV "
    "my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART_50 = _codes(
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV "
    "my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID "
    "ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA "
    "ur_PK xh_ZA gl_ES sl_SI"
)


def find_language(folder: Path, option: str, code: str | None, languages: Mapping[str, int]) -> int:
    """Return the token id of a language; "de" selects "de_DE" if no other code starts with "de_".

    option: name of the argument, for error messages. languages: token ids by code.

    >>> from pathlib import Path
    >>> from regard.translation.pretrained.languages import find_language
    >>> find_language(Path("mbart"), "source", "de", {"de_DE": 7, "en_XX": 8})
    7
    >>> find_language(Path("mbart"), "source", "dutch", {"de_DE": 7, "en_XX": 8})
    Traceback (most recent call last):
    regard.errors.ArgumentError: mbart has no language 'dutch'; choose source from de_DE, en_XX.
    """
    if code is None:
        raise ArgumentError(
            f"{folder} translates between {len(languages)} languages; choose {option} from "
            f"{list_languages(languages)}. In Python: load_translator(folder, source=…, target=…); on the "
            "command line: --languages FROM-TO."
        )
    if code in languages:
        return languages[code]
    matching = [name for name in languages if name.startswith(f"{code}_")]
    if len(matching) == 1:
        return languages[matching[0]]
    raise ArgumentError(
        f"{folder} has {'several variants of' if matching else 'no language'} {code!r}; choose {option} from "
        f"{list_languages(matching or languages, code)}."
    )


def list_languages(languages: Iterable[str], code: str = "") -> str:
    """Return the codes as text; if there are many, only those most similar to `code`, or well-known ones.

    >>> from regard.translation.pretrained.languages import M2M_100, list_languages
    >>> list_languages(M2M_100, "deu")
    'de … (100 languages)'
    """
    names = sorted(languages)
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    code = code.lower()
    similar = get_close_matches(code, names, _MAX_LISTED, 0.5)
    similar += [name for name in names if code and name.startswith(code[:2]) and name not in similar]
    similar = similar or [name for name in names if name.split("_")[0] in _WELL_KNOWN]
    return f"{', '.join(similar[:_MAX_LISTED])} … ({len(names)} languages)"
