import pytest

from ecorec import movielens


@pytest.fixture(scope="session")
def ratings():
    try:
        return movielens.load()
    except FileNotFoundError as absent:
        pytest.skip(str(absent))


@pytest.fixture
def small_data(tmp_path):
    """The path of an `.inter` file of 40 users with 12 ratings each, with its two companions."""
    lines = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float"],
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"],
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"],
    }
    for user in range(40):
        job = "writer" if user % 3 else "none"
        lines["user"].append(f"u{user}\t{20 + user}\t{'MF'[user % 2]}\t{job}\t12345")
        for n in range(12):
            item, rating, hour = (user + n * n) % 25, 1 + (user * n) % 5, user + 5 * n
            lines["inter"].append(f"u{user}\ti{item}\t{rating}\t{3600 * hour}")
    for item in range(25):
        genres = " ".join(["Drama", "War", "Western"][: item % 4])
        year = 1970 + item if item else "unkonwn"
        lines["item"].append(f"i{item}\tFilm {item}\t{year}\t{genres}")
    for suffix, text in lines.items():
        (tmp_path / f"small.{suffix}").write_text("\n".join(text) + "\n")
    return tmp_path / "small.inter"
