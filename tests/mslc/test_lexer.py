import pytest

from mlx_anvil.mslc.lexer import SourceError, TokenStream


def find(stream: TokenStream, text: str) -> int:
    return stream.text.index(text)


def test_unedited_source_renders_unchanged():
    source = '# 1 "a.metal"\nint x = 0x1p-3f; // kept\n\tchar c = \'\\n\';\nconst char* s = "a \\" b";\n'
    text, positions = TokenStream(source).render()
    assert text == source
    assert positions.lines == {}


def test_brackets_are_matched_and_nested():
    stream = TokenStream("f(a[b(1)], {2});")
    assert stream.text[stream.partner[1]] == ")"
    assert stream.partner[1] == len(stream) - 2
    assert stream.partner[find(stream, "[")] == find(stream, "]")


@pytest.mark.parametrize(
    ("source", "line", "column", "words"),
    [("int f() {\n  g(;\n}", 3, 1, "unexpected '}'"), ("a\n [b", 2, 2, "never closed")],
)
def test_unbalanced_brackets_name_the_place(source, line, column, words):
    with pytest.raises(SourceError, match=words) as error:
        TokenStream(source)
    assert error.value.position == (line, column)


def test_template_arguments_end_at_their_own_angle():
    stream = TokenStream("vec<T, (a > b ? 2 : 4)> x; if (a < b) c;")
    assert stream.close_angle(1) == find(stream, "x") - 1
    less = max(i for i, t in enumerate(stream.text) if t == "<")
    assert stream.close_angle(less) is None


def test_columns_map_back_through_edits():
    stream = TokenStream("float4 v = float4(1) + w;\n")
    second = [i for i, t in enumerate(stream.text) if t == "float4"][1]
    stream.insert_before(second, "::mslc::make<")
    stream.insert_after(second, ">")
    text, positions = stream.render()
    assert text == "float4 v = ::mslc::make<float4>(1) + w;\n"
    source = "float4 v = float4(1) + w;"
    for word in ("v =", "(1", "+", "w;"):
        assert positions.original_column(1, text.index(word) + 1) == source.index(word) + 1
    assert positions.original_column(1, text.index("make") + 1) == source.index("float4(") + 1


def test_dropped_code_takes_later_insertions_with_it():
    stream = TokenStream("a b c")
    stream.drop(1, 1)
    stream.insert_before(1, "X")
    assert "X" not in stream.render()[0]
