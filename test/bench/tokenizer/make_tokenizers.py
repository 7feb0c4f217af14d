#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the files in references/: small tokenizers, and what the tokenizers library does with them.

    make_tokenizers.py OUT CORPUS...   trains on the files CORPUS

It was run once, with tokenizers 0.23.3, on the Markdown pages of this project. Tests read what it wrote and do not
need the library. NAME.json is a tokenizer with the configuration of the model that it is named after;
stages.json has what is left. references.json has

    texts      the texts to encode
    NAME       ids: of each text; whole: of the first texts with the template's ids; exact: whether decoding the
               ids gives the text again; decoded: lists of ids, each with the bytes in hexadecimal, once with
               special tokens and once without
"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

N_WHOLE, N_DECODED = 12, 20
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
WORDS = """été naïve Zürich façade coöperate Ångström ſpecial ﬁne straße İstanbul IJSSEL ǅungla Ελληνικά русский текст
українська עברית العربية हिन्दी বাংলা தமிழ் ไทย 中文 汉字 日本語 ひらがな カタカナ 한국어 Tiếng Việt ქართული հայերեն አማርኛ""".split()


def special(content, **flags):
    return AddedToken(content, special=True, normalized=flags.pop("normalized", False), **flags)


def split(pattern):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


# Each case: pre_tokenizer, normalizer, added tokens, tokens before a text, merges, model fields.
CASES = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, [special("<|endoftext|>", normalized=True)], [],
             300, {"unk_token": "", "continuing_subword_prefix": "", "end_of_word_suffix": ""}),
    "llama3": (split(LLAMA3), None,
               [special(t) for t in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot_id|>>")],
               ["<|begin_of_text|>"], 400, {"ignore_merges": True}),
    "qwen2": (split(QWEN2), normalizers.NFC(),
              [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"),
               AddedToken("<tool_call>", normalized=False), AddedToken("<think>", normalized=False)],
              [], 400, {}),
    "tekken": (split(TEKKEN), None, [special(t) for t in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")], ["<s>"], 400,
               {"ignore_merges": True}),
    "stages": (pre_tokenizers.Sequence([
        pre_tokenizers.Split("::", "isolated"), pre_tokenizers.Split(Regex(r"(?=\p{Lu}\p{Ll})"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        normalizers.Sequence([normalizers.NFC()]),
        [special("<mask>", lstrip=True), special("<sep>", rstrip=True), special("<both>", lstrip=True, rstrip=True),
         AddedToken("école", normalized=True, special=False), AddedToken("e\u0301t", normalized=True, special=False),
         AddedToken("    ", normalized=True, special=False)], ["<sep>", "<mask>"], 200, {}),
}


def train(case, corpus):
    pre_tokenizer, normalizer, added, before, n_merges, _ = case
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=256 + n_merges, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus + WORDS * 3, trainer)
    tokenizer.add_tokens(added)
    if before:
        template = processors.TemplateProcessing(" ".join(before) + " $A",
                                                 special_tokens=[(t, tokenizer.token_to_id(t)) for t in before])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def rewrite(root, name, fields):
    """Makes differences that real files have: merges as texts, no type of the model, tokens without a merge."""
    model = root["model"]
    model.update(fields)
    if name == "gpt2":
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
        del model["type"]
    if fields.get("ignore_merges"):
        used = {part for pair in model["merges"] for part in pair}
        model["merges"] = [p for i, p in enumerate(model["merges"]) if i % 3 or p[0] + p[1] in used]


def make_texts(generator):
    texts = [
        "", " ", "  ", "\n", "a", "Hello world", " Hello  world ", "it's we'll I'M THEY'RE don't 'tis o'clock 'S 'ſ x'd've",
        "1 12 123 1234 1234567 3.14159 1,000,000 ½ ² Ⅷ ١٢٣ १२३ 𝟏𝟐", "a\n\nb\r\n\r\nc\n \n  d\n\t e\r", "   leading and trailing   ",
        "tab\tand\t\ttabs \t x", "for (int i = 0; i < n; i++) {\n    x[i] += y[i] * 2;\n}\n", "::std::vector::size",
        "!!!...???--- ===> {}[]()<>/\\|~`@#$%^&*_+", "https://example.org/a/b?c=d&e=%20f#g", "a/b//c/\n/d\r\n",
        "CamelCase HTTPServer iPhone ABCdef XMLHttpRequest2", "e\u0301t\u00e9 école e\u0301cole E\u0301COLE", "\u1100\u1161\u11a8 각",
        "a\u0327\u0301 a\u0301\u0327 o\u0302\u0301 q\u0307\u0323 \u0344 \u0958 \u212b \u2126 \uf900 \u0301 alone",
        "\u0e01\u0e33 \u09c7\u09be \u0bc6\u0bbe", "🙂 👍🏽 👨‍👩‍👧 🇩🇪 ☃️ ❤️‍🔥", "zero\u200bwidth\u200djoiner\ufeffbom\u00adsoft",
        "nbsp\u00a0thin\u2009ideographic\u3000line\u2028para\u2029nel\u0085vt\u000bff\u000cog\u1680mvs\u180e x", "\u180e\u180e\u180e a\u180eb",
        "nul\0in\0text \x01\x1f\x7f", "\U0010ffff\ufffd\uffff\U0001f9ff", "<|endoftext|>", "a<|endoftext|>b <|endoftext|>\n",
        "<|begin_of_text|>x<|eot_id|>y<|eot_id|>>z<|eot_id|", "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call> x",
        "<s>[INST] hi [/INST] ok</s>", "a <mask> b  <sep>  c \n<both>\t d<mask><sep> <both> <mask>", "<<mask>>", "x    école     e\u0301té école",
        " \u00a0\u3000<both>\u2003\u180ex", "<|<|endoftext|>|>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "a" * 300 + " " * 300 + "b",
    ]
    pieces = WORDS + ["the", "The", "parameter", "gradient", "'s", "'LL", " ", " ", " ", "  ", "\n", "\t", "7", "42", "2024", ".", ",", "!", "--",
                      "é", "e\u0301", "🙂", "\u00a0", "::", "<mask>", "<|eot_id|>", "</s>", "_", "/", "\r\n", "Ab", "ABc", "    "]
    for _ in range(190):
        texts.append("".join(generator.choice(pieces) for _ in range(generator.randint(2, 9))))
    return texts


def bytes_of(tokenizer, ids):
    """The bytes of ids: each character of the alphabet is one, and added tokens are UTF-8."""
    own = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    byte = {chr(b): b for b in own}
    byte |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in own)}
    added = tokenizer.get_added_tokens_decoder()
    return b"".join(added[i].content.encode() if i in added else bytes(byte[c] for c in tokenizer.id_to_token(i)) for i in ids)


def decode(tokenizer, generator):
    special_ids = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    for _ in range(N_DECODED):
        ids = [generator.randrange(tokenizer.get_vocab_size()) for _ in range(generator.randint(1, 10))]
        plain = [i for i in ids if i not in special_ids]
        for some, skip in ((ids, False), (plain, True)):
            text = bytes_of(tokenizer, some).decode("utf-8", "replace")
            unsure = any(ord(c) > 127 for i in some for c in (tokenizer.get_added_tokens_decoder().get(i) or AddedToken("")).content)
            assert unsure or text == tokenizer.decode(ids, skip_special_tokens=skip), (ids, text)
        yield [ids, bytes_of(tokenizer, ids).hex(), bytes_of(tokenizer, plain).hex()]


def main(out, paths):
    generator = random.Random(5)
    corpus = []
    for path in sorted(paths):
        with open(path, encoding="utf-8") as f:
            corpus.append(f.read())
    os.makedirs(out, exist_ok=True)
    texts = make_texts(generator)
    references = {"texts": texts}
    for name, case in CASES.items():
        root = json.loads(train(case, corpus).to_str())
        rewrite(root, name, case[-1])
        text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
        with open(os.path.join(out, name + ".json"), "w", encoding="utf-8") as f:
            f.write(text + "\n")
        tokenizer = Tokenizer.from_str(text)
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        exact = name not in ("qwen2", "stages")
        assert not exact or all(tokenizer.decode(i, skip_special_tokens=False) == t for i, t in zip(ids, texts))
        references[name] = {"ids": ids, "whole": [tokenizer.encode(t).ids for t in texts[:N_WHOLE]], "exact": exact,
                            "decoded": list(decode(tokenizer, generator))}
    with open(os.path.join(out, "references.json"), "w", encoding="utf-8", newline="") as f:
        f.write("{" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False, separators=(',', ':'))}" for k, v in references.items()) + "}\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
