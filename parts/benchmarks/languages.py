"""Words, as regular expressions, with which models state a choice in languages other than English, too."""

STATEMENTS = (  # in each language: "answer", other nouns that may be the subject, and "is"
    ("answer", "option|choice|letter|one|solution|statement|match|pick|conclusion|result|final|correct", "is|was|be"),
    ("antwort", "option|möglichkeit|lösung|buchstabe|richtig|korrekt", "ist|wäre|lautet"),
    ("réponse", "option|choix|proposition|lettre", "est|serait"),
    ("respuesta", "opción|alternativa|letra", "es|sería"),
    ("resposta", "opção|alternativa|letra", "é|és|seria"),
    ("risposta", "opzione|alternativa|lettera", "è|sarebbe"),
    (r"răspuns\w*", r"opțiun\w*|variant\w*", "este|e"),
    ("antwoord", "optie|keuze|letter", "is|luidt"),
    (r"svar\w*", r"alternativ\w*", "är|er"),
    (r"odpowied[zź]\w*", r"opcj\w*|wariant\w*|wybór", "to|jest|brzmi"),
    (r"odpově[dď]\w*", r"možnost\w*", "je|zní"),
    (r"válasz\w*", r"lehetőség\w*", "az?"),
    (r"ceva[pb]\w*|yanıt\w*", r"seçene\w*|şık\w*", "şudur"),
    (r"ответ\w*", r"вариант\w*|букв\w*", "это|является|будет"),
    (r"відповід\w*", r"варіант\w*", "це|є"),
    ("απάντηση", "επιλογή", "είναι"),
    ("đáp án|câu trả lời", "lựa chọn|phương án", "là"),
    (r"jawaban\w*", r"pilihan\w*|opsi", "adalah|ialah|yaitu"),
    (r"(?:ال)?[إا]جاب[ةه]|(?:ال)?جواب|پاسخ", r"(?:ال)?خيار|گزینه", "هي|هو"),
    ("उत्तर|जवाब", "विकल्प", "है"),
)
ANSWER, SUBJECT, _ = ("|".join(column) for column in zip(*STATEMENTS))
EAST_ASIAN = (  # these are not separated from what follows
    "(?:答案|选项?|選項?|选择|選擇|選択肢|答え|解答|回答|正解|正答|而是|(?:正しい|適切な|適当な)のは|"
    "정답|답[안변]?|선택지?|보기|答(?=:)|คำตอบ)"
    r"(?:\s?(?:应该|應該|应当|[是为為应應选選就则則はがも은는이가]|바로|คือ)){0,4}"
)
EAST_ASIAN_RIGHT = (  # after a letter
    r"(?:选项|選項|项|項|번)?[是がは이가은는]?\s?(?:正确|正確|正解|正しい|を選|[를을] ?선택|정답|맞)"
)
OPTION = (
    r"option|choice|opción|opção|opzione|alternativ\w*|optie|opcja|možnost|seçenek|şık|вариант|варіант|phương án|"
    "lựa chọn|pilihan|الخيار|گزینه|विकल्प"
)
CHOOSE = (
    "prefer|choose|chose|select|pick|go with|going with|say|wähle|choisis|elijo|escolho|scelgo|aleg|"
    "kies(?: voor)?|väljer|velger|wybieram|vybírám|выбираю|обираю|chọn|pilih"
)
THING = (  # what a letter names: "point C", but not "vitamin C"
    "point|structure|angle|city|country|sample|object|number|box|circle|position|location|step|arrow|"
    "figure|image|picture|photo|panel|graph|diagram|plot|chart|curve|line|region|shape|statement|item|label|punkt|"
    "bild|abbildung|figura|punto|ponto|imagen|imagem|immagine|punt|figuur|rysunek|nokta|şekil|рисунок|точка|hình|điểm"
)
IT_IS = r"(?:it|that)(?:['’]s| is)|(?:that|which) leaves"
SO = (
    "ergo|finally|conclusion|"
    "definitely|certainly|clearly|obviously|but|sondern|sino|so|thus|hence|therefore|then|donc|alors|daher|somit|portanto|"
    "quindi|dunque|dus|więc|zatem|поэтому|значит|vậy"
)
ARTICLE = "the|la|le|el|il|lo|die|der|das|de|het|den|phải"
IS = "is|was|ist|est|es|está|é|è|jest|är|là|adalah|является|это"  # none that means something else in another language
NOT = (
    "not|never|neither|nor|cannot|no|none|if|whether|unless|except|nicht|keine?|weder|pas|jamais|nunca|non|não|nu|niet|"
    "geen|inte|ikke|nie|není|nem|değil|не|нет|ні|δεν|không|bukan|ليست?|نیست|नहीं|(?:wrong|false|falsch|fauss|mauvais|falsa|"
    r"incorre|errad|errat|sbagliat|fout|onjuist|błędn|yanlış|неправильн|неверн|salah|خاطئ)\w*"
)
NOT_BEFORE = (  # right before a noun or a verb; each is a lookbehind of fixed width
    r"not |n't |never |\bno |não |non |не |không |nie |不|不[应應能该該]|别|別|wrong |incorrect |false |alsche |"
    "mauvaise |foute |onjuiste |błędna |iepoprawna |anlış |неправильный |неверный |错误|錯誤|틀린 |오"
)
TRUE = (
    r"(?:right|richtig|correc|korrekt|corret|juist|goed|poprawn|prawidłow|doğru|верн|правильн|správn|rätt|riktig)\w*|best|"
    "juste|bonne|đúng|benar|صحيح"
)
OR = (
    "or|and|maybe|perhaps|possibly|probably|oder|und|ou|et|o|y|e|или|и|або|lub|i|of|en|eller|och|og|veya|ve|hoặc|và|"
    "atau|dan|أو|و"
)
TAKEN_BACK = (  # after a letter
    "では|じゃ|[이가은는] ?아|不(?!是 ?[A-Z])|错|錯|(?:is|was)n['’]t|n['’]est|değil|yanlış|cannot|does(?: not|n['’]t)"
)
