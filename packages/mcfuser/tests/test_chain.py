import pytest

from mcfuser import chain

TWO = "bmk,bkn->bmn; bmn,bnh->bmh"


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        "bmk,bkn->bmn; gelu; bmn,bnh->bmh",
        "xyij,xyjk->xyik; softmax; xyik,xykl->xyil",
        "mk,kn->mn; mn,nh->mh",
        "bmk,bnk->bmn; relu; bmn,bhn->bmh",
    ],
)
def test_the_text_of_a_chain_is_read_back_as_an_equal_chain(text):
    assert str(chain(text)) == text
    assert chain(str(chain(text))) == chain(text)
    assert hash(chain(text)) == hash(chain(str(chain(text))))


def test_operands_batch_and_loops_have_their_names():
    made = chain("abmk,abkn->abmn; silu; abmn,abnh->abmh")
    assert (made.operands, made.output, made.batch) == (("A", "B", "D"), "E", "ab")
    assert sorted(made.loops) == ["h", "k", "m", "n"]
    assert [c.reduction for c in made.contractions] == ["k", "n"]
    assert made.contractions[0].stages == ("silu",)


def test_sizes_come_from_shapes():
    shapes = [(2, 5, 3), (2, 3, 7), (2, 7, 11)]
    assert chain(TWO).sizes(shapes) == {"b": 2, "m": 5, "k": 3, "n": 7, "h": 11}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(1, 512, 64), (1, 48, 256), (1, 256, 64)], "k: 64 in A, 48 in B"),
        ([(1, 5, 3), (1, 3, 7), (1, 8, 2)], "n: 7 in B, 8 in D"),
        ([(5, 3), (1, 3, 7), (1, 7, 2)], r"A must have dimensions bmk; got shape \(5, 3\)"),
        ([(1, 5, 3), (1, 3, 7)], "takes A, B, D: 3; got 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_letter_and_sizes(shapes, words):
    with pytest.raises(ValueError, match=words):
        chain(TWO).sizes(shapes)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("bmk,bkn->bmn; tanh; bmn,bnh->bmh", "'tanh'"),
        ("gelu; bmk,bkn->bmn; bmn,bnh->bmh", "'gelu'"),
        ("bmk,bkn->bmn; bmn,bnh->bmh; gelu", "'gelu'"),
        ("bmk,bkn->bmn; relu; gelu; bmn,bnh->bmh", "'gelu' after relu"),
        ("bmk,bkn->bmn", "1 in"),
        (TWO + "; bmh,bhj->bmj", "3 in"),
        ("bmk,bkn->bmn; bmk,bkh->bmh", "'bmk,bkh->bmh'"),
        ("bmk,bkn->bmn; bmn,bnm->bmm", "'bmn,bnm->bmm'"),
        ("bmk,bkn->bmn; bmn,bnk->bmk", "'bmn,bnk->bmk'"),
        ("bmk,bkn->bmk; bmk,bkh->bmh", "'bmk,bkn->bmk'"),
        ("bmk,bkn->bmnk; bmn,bnh->bmh", "'bmk,bkn->bmnk'"),
        ("bmk->bmk; bmk,bkh->bmh", "'bmk->bmk'"),
        ("mbk,mkn->mbn; bmn,bnh->bmh", "'bmn,bnh->bmh'"),
        ("bm1,b1n->bmn; bmn,bnh->bmh", "'bm1,b1n->bmn'"),
        ("", "''"),
    ],
)
def test_what_is_no_chain_is_refused_and_quoted(text, quoted):
    with pytest.raises(ValueError, match="got .*" + quoted):
        chain(text)
