"""Letters and whole numbers in responses."""

import json
import time

import pytest

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")

from common.environments import tool_call
from grading.answers import answer_part, boxes_of, first_count, last_boxed, short_answer
from parts.benchmarks.choices import extract_choice, whole_number
from tests.helpers.marks import slow
from tests.helpers.scripts import VECTORS
from tests.helpers.texts import TEXTS, check_with_any_text

CASES = [json.loads(line) for line in (VECTORS / "choice.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["completion"])
def test_choice_vectors(case):
    assert extract_choice(case["completion"]) == case["want"]


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("The answer is A. No wait, the answer is C.", "C"),
        ("<answer>A</answer> hm <answer>(d)</answer>", "D"),
        ("\\boxed{\\text{B}} so the answer is C", "B"),
        ("b", "B"),
        ("C) because of the shadow", "C"),
        ("Answer: $B$", "B"),
        ("the answer is $\\text{B}$.", "B"),
        ("the answer is $b + 1$", None),
        ("(A) is too dark, so it must be (D)", "A"),
        ("it could be (B) or rather (C)", "C"),
        ("<think>the answer is A</think>\nB", "B"),
        ("The answer is A?</think>\nB", "B"),  # the chat template had put <think> in the prompt
        ("A dog and a cat", None),
        ("I think so", None),
        ("", None),
        ("the answer is a dog", None),
    ],
)
def test_choices_beyond_the_vectors(completion, want):
    assert extract_choice(completion) == want


@pytest.mark.parametrize(
    "texts",
    [
        "Antwort: C|Die richtige Antwort ist C.|Die Antwort lautet C",
        "Die richtige Option ist C|C ist richtig.|Ich wähle C.",
        "La réponse est C.|Réponse : C|La bonne réponse est la C.",
        "La réponse est donc C|C est la bonne réponse|Je choisis C",
        "La respuesta correcta es C.|Respuesta: C|La opción correcta es la C.",
        "La respuesta es la letra C|C es correcta.",
        "A resposta é C.|Resposta correta: letra C|A alternativa correta é a C.",
        "A resposta correta é a letra C.|Escolho C",
        "La risposta è C.|La risposta corretta è la C.|L'opzione corretta è la C|C è corretta.|Risposta: C",
        "Ответ: C|Правильный ответ — C.|Ответ: вариант C",
        "Правильный вариант: C|Верный ответ - C|Правильна відповідь: C",
        "Odpowiedź: C|Prawidłowa odpowiedź to C.|Poprawną odpowiedzią jest C.|Odpowiedź C jest poprawna.|Odpověď: C",
        "Het juiste antwoord is C.|Antwoord: C|De juiste optie is C.|C is juist.|Rätt svar är C|Svaret er C.",
        "Cevap: C|Doğru cevap C'dir.|Doğru yanıt: C|Doğru cevap C şıkkıdır.|Doğru seçenek C|Απάντηση: C",
        "정답: C|정답은 C입니다.|답은 C번입니다|올바른 답은 C입니다.|C가 정답입니다|따라서 정답은 (C)입니다.",
        "正確答案是C|答案為 C|正確的選項是C。|選C|我選擇C|故選：C|選項C正確|本题答案为C|所以C。|C是正確的",
        "正解はCです|答え：C|正しい答えはCです。|答えは「C」です|Cが正解です|正解は選択肢Cです|最も適切なのはCです",
        "الإجابة: C|الإجابة الصحيحة هي C|الجواب هو C.|الإجابة هي الخيار C|सही उत्तर C है",
        "Đáp án: C|Đáp án đúng là C.|Câu trả lời là C.|Chọn C|Jawabannya adalah C|Jawaban: C",
        "The correct choice would be C|The answer, therefore, is C.|The answer is point C",
        "The answer is figure C|So C.|It is C",
        "Between A and C, C fits better.|Of A and C, C is better.|Only C fits.",
        "C is the best choice.|The best match is C",
        "The answer is most likely C.|The answer must clearly be C|The answer to this question is C.",
        "I chose C.|Hence, C.",
        "The answer, I think, is C|Of A, B and C, C is best.|Between A and C, C makes more sense.|In conclusion, C.",
        "C번이 정답입니다.|선택: C|答案就是C|Ik kies voor C.|Doğru şık C'dir.|Prawidłowy wybór to C|I prefer C.",
        "The answer is not A but C.|The answer is C and not A.",
        "Both A and B are wrong. The answer is C.|It must be C.",
    ],
)
def test_letters_in_many_languages_and_sentences(texts):
    assert {text: extract_choice(text) for text in texts.split("|")} == dict.fromkeys(texts.split("|"), "C")


@pytest.mark.parametrize(
    "texts",
    [
        "Respuesta: A|La respuesta es A porque es roja.|Die Antwort ist A, weil",
        "A resposta é a A.|La réponse est A car",
        "正解はAです|답은 A입니다|Doğru cevap A'dır.|Between A and C, A fits better.|So A.|Only A fits.",
    ],
)
def test_an_a_that_is_no_article(texts):
    assert {text: extract_choice(text) for text in texts.split("|")} == dict.fromkeys(texts.split("|"), "A")


@pytest.mark.parametrize(
    "texts",
    [
        "The answer is not B|The answer isn't B.|The answer cannot be B.",
        "The wrong answer is B|B is not the answer|B is wrong",
        "Die Antwort ist nicht B.|La respuesta no es B.|La réponse n'est pas B.",
        "A resposta não é B.|La risposta non è B.",
        "Ответ не B.|答案不是B|不應選B|正解はBではありません|الإجابة ليست B|정답은 B가 아닙니다|Cevap B değil|B不正确",
        "Odpowiedź to nie B|Het antwoord is niet B|Đáp án không phải là B",
        "Die falsche Antwort ist B.|C est incorrecte",
        "Antwort: A oder B|La réponse est A ou B|La respuesta es A o B|Ответ: A или B|A lub B",
        "答えはAかB|정답은 A 또는 B",
        "Vitamin C is shown.|A cat is shown|Vitamin C|C vitamini gösteriliyor.|비타민 C가 보입니다.|維生素C",
        "Option B cannot be correct|B does not fit.|정답은 C는 아닙니다|C nie jest poprawna.|C yanlış.|C是錯的",
        "The answer is vitamin C|Hepatitis B is common.|Plan B is shown.",
        "Figure C is shown.|Move A to the right.|Team B won|Grade A|La vitamine C est montrée|Группа B показана",
        "Antwort: Ein Hund|A resposta é um cachorro|Un chat|No sé|So I think it is a cat|Either A or B fits better",
        "The answer depends on whether it is B|The solution A has a higher pH|None of the options is correct.",
    ],
)
def test_what_chooses_no_letter_in_many_languages(texts):
    assert {text: extract_choice(text) for text in texts.split("|")} == dict.fromkeys(texts.split("|"))


PIECES = (
    *(
        "answer ",
        "answer is ",
        "answer: ",
        "option A ",
        "alternativa ",
        "clearly ",
        "so ",
        "not ",
        "or ",
        "B fits ",
        "(A)",
    ),
    *(
        "A",
        "A, ",
        "A or ",
        "A.\n",
        "A. cat\nB. dog\n",
        "选",
        "选项",
        "答案是",
        "正解は",
        "정답은 ",
        "か",
        "1",
        "1,",
        "9,111",
    ),
    *(
        "\\boxed{",
        "\\boxed ",
        "\\text",
        "\\frac{",
        "{",
        "}",
        "(",
        "[",
        "]",
        "<",
        "<a ",
        "-1",
        "1.",
        "/",
        " ",
        "\n",
        "\t",
    ),
    *("a", "a ", "é", "$", "*", "**", "_", "'", '"', "’", ",", ".", ":", "=", "- ", "<think>", "</think>", "<answer>"),
    *("</answer>", "<tool_call>", '<tool_call>{"', "<|begin_of_box|>"),
)


def seconds(function, text: str) -> float:
    start = time.process_time()
    try:
        function(text)
    except ValueError as error:
        assert function is tool_call, error
    return time.process_time() - start


@pytest.mark.parametrize(
    "function",
    [extract_choice, whole_number, tool_call, boxes_of, last_boxed, answer_part, short_answer, first_count],
)
@pytest.mark.parametrize("size", [6_000, *slow(30_000)])
def test_no_repeated_piece_is_long_to_read(function, size):
    """A response of 30,000 characters takes a second at most. What grows faster than the text shows in 6,000 too."""
    around = (("", ""), ("answer is", ""), ("\\boxed{1", "/}"), ("<a b=", ""))
    texts = [(start + piece * size)[:size] + end for piece in PIECES for start, end in around]
    limit = size / 30_000
    late = [text[:40] for text in texts if seconds(function, text) > limit and seconds(function, text) > limit]
    assert not late


@pytest.mark.parametrize("texts", ["random bytes", *slow("10,000 characters")])
def test_no_text_makes_a_choice_fail_or_wait(texts):
    check_with_any_text(
        lambda text, _: extract_choice(text), lambda v: v is None or (len(v) == 1 and "A" <= v <= "Z"), TEXTS[texts]
    )
