"""A small part of the fuzzer, and that it finds what there is to find."""

from pipeline import headers
from tests.pipeline import fuzz

UPRIGHT, TURNED = [fuzz.HEIGHT, fuzz.WIDTH], [fuzz.WIDTH, fuzz.HEIGHT]


def test_each_number_is_a_file_of_its_own():
    for name, data in fuzz.PICTURES.items():  # taken apart and put together it is the same picture
        again = fuzz.whole(name, *fuzz.parts(name, data), True)
        sizes = [fuzz.scanned(headers.read_headers, picture) for picture in (data, again)]
        assert sizes in ([UPRIGHT, UPRIGHT], [TURNED, TURNED]), name
    made = [fuzz.mutated(seed) for seed in range(300)]
    assert made == [fuzz.mutated(seed) for seed in range(300)]
    assert len({data for _, data in made} - set(fuzz.PICTURES.values())) > 250
    assert {said.split()[0].strip(",") for said, _ in made} == {"JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM"}


class Reader:
    """In place of the decoder: its results one after the other, whatever it is given."""

    def __init__(self, *results):
        self.results = iter(results)

    def decode(self, contents):
        return [next(self.results) for _ in contents]


def test_what_counts_as_a_finding(monkeypatch):
    monkeypatch.setattr(fuzz, "_perturb", lambda byte: None)  # of this process
    good, other, wide, bad = (None, (5, 7), 1), (None, (5, 7), 2), (None, (7, 5), 1), ("cut", None, None)

    def found(*results, size=(5, 7)):
        return fuzz.answers(Reader(*results), lambda *_: [size if isinstance(size, str) else list(size)], [3])[0]

    assert found(good, good, good) == [None, None] and found(bad, bad) == ["decoder: cut", None]
    assert found(size="not an image") == ["not an image", None]
    assert found(good, wide, wide) == [None, "the index has [5, 7], the pixels are [7, 5]"]
    assert "other pixels" in found(good, good, other)[1] and "cut" in found(good, good, bad)[1]
    assert found((None, (2000, 2000), 1), size=(2000, 2000)) == [None, None]  # a large one: alone only


def test_nothing_is_found_in_a_few():
    findings, admitted, decoded = fuzz.fuzz(180, 64)
    assert not findings and 64 > admitted > decoded > 10
