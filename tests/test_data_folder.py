"""Plain image folders: every kind of file has a defined handling, and is counted."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data_makers import encode, random_pixels, write_images
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tinydit_ray.data import DataError, DataSpec, ImageFolderDataset, load, prepare
from tinydit_ray.data.folder import list_images
from tinydit_ray.data.pictures import PictureError, read_picture


def folder_spec(root):
    return DataSpec(source="folder", root=str(root))


def halves(mode="RGB", left=0, right=255, size=(64, 64), turn=False):
    """A picture dark on the left (or on top) and bright on the right (or below)."""
    width, height = size
    image = Image.new(mode, size, left)
    box = (0, height // 2, width, height) if turn else (width // 2, 0, width, height)
    image.paste(right, box)
    return image


def centre(pixels, row, column):
    """Mean colour around a place given in quarters of the picture."""
    return pixels[row * 8 - 2 : row * 8 + 2, column * 8 - 2 : column * 8 + 2].mean((0, 1))


# --- one picture of each kind ---


@pytest.mark.parametrize(
    ("make", "name", "kind"),
    [
        (lambda: halves("L"), "a.png", "grey"),
        (lambda: halves("L"), "A.JPG", "grey"),
        (lambda: halves("1", 0, 1), "a.png", "grey"),
        (lambda: halves("L").convert("P"), "a.gif", "palette"),
        (lambda: halves("RGB", (0, 0, 0), (255, 255, 255)).quantize(4), "a.png", "palette"),
        (lambda: halves("CMYK", (0, 0, 0, 255), (0, 0, 0, 0)), "a.jpeg", "CMYK"),
        (lambda: halves("CMYK", (0, 0, 0, 255), (0, 0, 0, 0)), "a.tif", "CMYK"),
        (lambda: halves("RGBA", (0, 0, 0, 255), (9, 9, 9, 0)), "a.png", "transparent"),
        (lambda: halves("RGBA", (0, 0, 0, 255), (9, 9, 9, 0)), "a.WebP", "transparent"),
        (lambda: halves("LA", (0, 255), (9, 0)), "a.png", "transparent"),
        (lambda: halves("I;16", 0, 65535), "a.png", "16-bit or float grey"),
        (lambda: halves("I;16", 0, 65535), "a.tiff", "16-bit or float grey"),
        (lambda: halves("I", -1000, 1000000), "a.tif", "16-bit or float grey"),
        (lambda: halves("F", -0.5, 0.25), "a.tif", "16-bit or float grey"),
        (lambda: halves("RGB", (0, 0, 0), (255, 255, 255)), "a.bmp", ""),
        (lambda: halves("RGB", (0, 0, 0), (255, 255, 255)), "a.PPM", ""),
    ],
)
def test_each_mode_becomes_rgb(tmp_path, make, name, kind):
    make().save(tmp_path / name)
    picture = read_picture(tmp_path / name, 32)
    assert picture.pixels.shape == (32, 32, 3)
    assert picture.pixels.dtype == np.uint8
    assert picture.changes == ((kind,) if kind else ())
    assert centre(picture.pixels, 2, 1).max() < 6
    assert centre(picture.pixels, 2, 3).min() > 249


def test_16_bit_grey_keeps_its_scale(tmp_path):
    """A dark picture stays dark: 16 bits have a fixed range."""
    Image.new("I;16", (40, 40), 0x1234).save(tmp_path / "a.png")
    assert set(read_picture(tmp_path / "a.png", 32).pixels.ravel().tolist()) == {0x12}


def test_a_transparent_palette_entry_is_white(tmp_path):
    image = Image.new("P", (40, 40), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(1, (20, 0, 40, 40))
    image.save(tmp_path / "a.png", transparency=0)
    picture = read_picture(tmp_path / "a.png", 32)
    assert picture.changes == ("transparent",)
    assert centre(picture.pixels, 2, 1).tolist() == [255, 255, 255]
    assert centre(picture.pixels, 2, 3).tolist() == [255, 0, 0]


# EXIF orientation -> where (row, column in quarters) the top left corner of the stored picture is seen
CORNERS = {1: (1, 1), 2: (1, 3), 3: (3, 3), 4: (3, 1), 5: (1, 1), 6: (1, 3), 7: (3, 3), 8: (3, 1)}


@pytest.mark.parametrize("orientation", CORNERS)
@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_exif_orientation(tmp_path, orientation, ending):
    image = Image.new("RGB", (400, 400), "white")
    image.paste((0, 0, 0), (0, 0, 200, 200))
    image.paste((255, 0, 0), (200, 0, 400, 200))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{ending}", exif=exif, quality=95)
    picture = read_picture(tmp_path / f"a.{ending}", 32)
    assert picture.changes == (("turned by EXIF",) if orientation > 1 else ())
    row, column = CORNERS[orientation]
    assert centre(picture.pixels, row, column).max() < 12
    opposite = centre(picture.pixels, 4 - row, 4 - column)
    assert opposite.min() > 243


def test_unreadable_exif_is_told(tmp_path):
    texts = PngInfo()
    texts.add_text("Raw profile type exif", "\nexif\n4\nno hex digits")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png", pnginfo=texts)
    assert read_picture(tmp_path / "a.png", 32).changes == ("unreadable EXIF, not turned",)


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tif"])
def test_of_an_animation_the_first_frame(tmp_path, ending):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ((200, 0, 0), (0, 200, 0), (0, 0, 200))]
    frames[0].save(tmp_path / f"a.{ending}", save_all=True, append_images=frames[1:], lossless=True)
    picture = read_picture(tmp_path / f"a.{ending}", 32)
    assert "first of many frames" in picture.changes
    assert centre(picture.pixels, 2, 2).tolist() == [200, 0, 0]


def test_the_centre_square_is_kept(tmp_path):
    image = Image.new("RGB", (300, 100), "black")
    image.paste((0, 255, 0), (100, 0, 200, 100))
    image.save(tmp_path / "wide.png")
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "high.png")
    for name in ("wide.png", "high.png"):
        pixels = read_picture(tmp_path / name, 32).pixels
        assert pixels.reshape(-1, 3).min(0).tolist() == [0, 255, 0]


@pytest.mark.parametrize("size", [(32, 32), (1, 1), (3000, 2), (5, 700), (1500, 1000)])
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_any_size_becomes_the_wanted_one(tmp_path, size, ending):
    Image.new("RGB", size, (10, 120, 230)).save(tmp_path / f"a.{ending}", quality=95)
    pixels = read_picture(tmp_path / f"a.{ending}", 32).pixels.reshape(-1, 3).astype(int)
    assert len(pixels) == 1024
    assert np.abs(pixels - [10, 120, 230]).max() <= 4


def test_pixels_of_a_picture_of_the_right_size_are_untouched(tmp_path):
    expected = random_pixels(1)[0]
    (tmp_path / "a.png").write_bytes(encode(expected))
    assert np.array_equal(read_picture(tmp_path / "a.png", 32).pixels, expected)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image"),
        (b"just text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (encode(random_pixels(1)[0])[:1500], "cut short or corrupt"),
        (encode(random_pixels(1)[0], "JPEG")[:700], "cut short or corrupt"),
    ],
)
def test_files_that_are_no_picture(tmp_path, content, reason):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(PictureError, match=reason):
        read_picture(tmp_path / "a.png", 32)


# --- a whole folder ---


def test_counts_of_what_was_used_converted_and_skipped(tmp_path):
    root = write_images(tmp_path / "bîlder mit platz", 20)
    halves("L").save(root / "GREY.JPG")
    halves("L").save(root / "grey.png")
    halves("CMYK", (0, 0, 0, 255), (0, 0, 0, 0)).save(root / "ink.tif")
    (root / "cut.jpg").write_bytes(encode(random_pixels(1)[0], "JPEG")[:700])
    (root / "fake.png").write_text("no picture")
    (root / "notes.txt").write_text("hello")
    (root / ".hidden.png").write_bytes(encode(random_pixels(1)[0]))
    (note,) = load(folder_spec(root), "train", tmp_path / "c").notes
    assert note == (
        "used 23 (21 train, 2 test), converted 3 (grey 2, CMYK 1), skipped 4 (hidden: .hidden.png;"
        " cut short or corrupt: cut.jpg; not an image: fake.png; no image ending: notes.txt)"
    )


def test_subfolders_are_classes_in_the_order_of_their_names(tmp_path):
    for label, name in enumerate(["Zebra", "apfel", "über"]):  # upper case sorts first
        write_images(tmp_path / "d" / name, 10, seed=label)
    write_images(tmp_path / "d", 4, prefix="loose", seed=9)
    splits = [load(folder_spec(tmp_path / "d"), split, tmp_path / "c") for split in ("train", "test")]
    counts = sum(split.labels.add(1).bincount(minlength=4) for split in splits)
    assert counts.tolist() == [4, 10, 10, 10]
    expected = {encode(pixels): label for label in range(3) for pixels in random_pixels(10, label)}
    for split in splits:
        for image, label in zip(split.images, split.labels.tolist(), strict=True):
            assert expected.get(encode(image.permute(1, 2, 0).numpy()), -1) == label


@pytest.mark.parametrize(("train", "test"), [("train", "test"), ("Train", "VAL"), ("train", "validation")])
def test_the_folder_s_own_split_is_kept(tmp_path, train, test):
    write_images(tmp_path / "d" / train / "a", 5)
    write_images(tmp_path / "d" / train / "b", 4)
    write_images(tmp_path / "d" / test / "b", 3)
    write_images(tmp_path / "d" / "extra", 1)
    spec = folder_spec(tmp_path / "d")
    sets = load(spec, "train", tmp_path / "c"), load(spec, "test", tmp_path / "c")
    assert sets[0].labels.tolist() == [0] * 5 + [1] * 4
    assert sets[1].labels.tolist() == [1] * 3
    assert "outside the train and test folders: extra/000.png" in sets[0].notes[1]


def test_test_wins_over_val(tmp_path):
    for name, count in (("train", 5), ("test", 2), ("val", 3)):
        write_images(tmp_path / "d" / name, count)
    assert len(load(folder_spec(tmp_path / "d"), "test", tmp_path / "c")) == 2


def test_train_alone_is_the_whole_and_train_among_others_a_class(tmp_path):
    write_images(tmp_path / "d" / "train" / "x", 10)
    assert load(folder_spec(tmp_path / "d"), "train", tmp_path / "c").labels.tolist() == [0] * 9
    write_images(tmp_path / "d" / "bus", 10)
    labels = load(folder_spec(tmp_path / "d"), "train", tmp_path / "c").labels
    assert labels.bincount().sum() == 18
    assert set(labels.tolist()) == {0, 1}


def test_a_class_named_test_is_no_split_without_train(tmp_path):
    write_images(tmp_path / "d" / "test", 10)
    write_images(tmp_path / "d" / "other", 10)
    train = load(folder_spec(tmp_path / "d"), "train", tmp_path / "c")
    assert set(train.labels.tolist()) == {0, 1}
    assert len(train) == 18


def test_the_90_10_split_depends_on_names_alone(tmp_path):
    one = write_images(tmp_path / "one", 50)
    two = tmp_path / "two"
    two.mkdir()
    for path in sorted(one.iterdir(), reverse=True):  # written in another order, at another time
        shutil.copy(path, two)
    digests = [prepare(folder_spec(root), tmp_path / "c").digest for root in (one, two)]
    assert digests[0] == digests[1]
    assert len(load(folder_spec(one), "test", tmp_path / "c")) == 5


@pytest.mark.parametrize(
    ("count", "message"), [(0, "no usable image; used 0.*notes.txt"), (1, "only one usable image")]
)
def test_too_few_images(tmp_path, count, message):
    root = write_images(tmp_path / "d", count)
    (root / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=message):
        prepare(folder_spec(root), tmp_path / "c")


def test_an_empty_half_of_the_split_is_an_error(tmp_path):
    write_images(tmp_path / "d" / "train", 5)
    (tmp_path / "d" / "test").mkdir()
    (tmp_path / "d" / "test" / "a.png").write_text("no picture")
    with pytest.raises(DataError, match="no usable image in its test folder"):
        prepare(folder_spec(tmp_path / "d"), tmp_path / "c")


# --- links, pipes, permissions ---


@pytest.mark.timeout(30)
def test_link_loops_end_and_linked_folders_are_read_once(tmp_path):
    root = write_images(tmp_path / "d" / "a", 4).parent
    write_images(tmp_path / "elsewhere", 3, prefix="e")
    for i in range(12):  # every folder links to every other: without a memory there are 12! ways through
        (root / f"f{i}").mkdir()
        for j in range(12):
            (root / f"f{i}" / f"to{j}").symlink_to(root / f"f{j}")
    (root / "a" / "up").symlink_to(root)
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "broken.png").symlink_to(root / "nothing.png")
    (root / "0 link").symlink_to(tmp_path / "elsewhere")
    (root / "1 link").symlink_to(tmp_path / "elsewhere")
    (root / "2 link").symlink_to(root / "a")
    listing = list_images(root)
    names = [name for name, _ in listing.files]
    assert names == [f"0 link/e{i:03}.png" for i in range(3)] + [f"a/{i:03}.png" for i in range(4)]
    assert listing.skipped == (("broken.png", "broken link"), ("loop.png", "link loop"))


@pytest.mark.timeout(30)
def test_a_pipe_with_an_image_s_name_does_not_hang(tmp_path):
    root = write_images(tmp_path / "d", 10)
    os.mkfifo(root / "pipe.jpg")
    (note,) = load(folder_spec(root), "train", tmp_path / "c").notes
    assert "not a regular file: pipe.jpg" in note


@pytest.fixture
def as_nobody():
    """A folder that an ordinary user reaches, and this process as such a user if it was root."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    was_root = os.geteuid() == 0
    yield folder, (lambda: os.seteuid(65534)) if was_root else (lambda: None)
    if was_root:
        os.seteuid(0)
    for path in folder.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(folder)


def test_unreadable_folders_and_files_are_skipped_with_the_reason(tmp_path, as_nobody):
    folder, become_nobody = as_nobody
    write_images(folder / "closed", 2).chmod(0)
    write_images(folder, 10)
    (folder / "003.png").chmod(0)
    assert stat.S_IMODE((folder / "closed").stat().st_mode) == 0
    become_nobody()
    cache = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        (note,) = load(folder_spec(folder), "train", cache).notes
    finally:
        shutil.rmtree(cache)
    assert "used 9" in note
    assert "skipped 2 (no permission: 003.png, closed/)" in note


# --- by the tutorial's name ---


def test_image_folder_dataset_at_its_own_size(tmp_path, capsys):
    write_images(tmp_path / "train" / "a", 3)
    halves("L").save(tmp_path / "b.png")
    data = ImageFolderDataset(tmp_path, 48)
    assert data.images.shape == (4, 3, 48, 48)
    assert data.labels.tolist() == [-1, 0, 0, 0]
    assert data.images.is_contiguous()
    assert "used 4, converted 1 (grey 1), skipped 0" in capsys.readouterr().out
    assert torch.equal(data[0][0].ge(-1) & data[0][0].le(1), torch.ones(3, 48, 48, dtype=torch.bool))


def test_image_folder_dataset_without_images(tmp_path):
    with pytest.raises(DataError, match="no usable image"):
        ImageFolderDataset(tmp_path, 32)
    with pytest.raises(DataError, match="does not exist"):
        ImageFolderDataset(tmp_path / "nowhere", 32)
    with pytest.raises(DataError, match="img_size 0"):
        ImageFolderDataset(tmp_path, 0)
