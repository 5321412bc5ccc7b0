"""What `mkdocs build` does beside rendering the pages under docs/.

- Pages elsewhere in the repository that the navigation or a page names, such as CHANGELOG.md, become pages of the site,
  and images and the schema become its files. A link to anything else, such as a source file, becomes the file's name.
- Notebooks become pages, with what they show; the notebooks themselves can be downloaded there.
- HTML comments are left out: they hold code that the tests run and readers need not see.
- Messages and other output wrap; output in aligned columns scrolls.
- The first sentence of a page is its description, in the page's head and in llms.txt (https://llmstxt.org), which lists
  the pages of the navigation.
"""

import json
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import to_markdown

log = logging.getLogger("mkdocs.hooks.shardkeep")  # a warning of this logger fails the build

_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^( *```).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FILES = (".png", ".svg", ".jpg", ".schema.json")  # beside pages
_NOTEBOOK = ".ipynb"
_OUTPUT = re.compile(r'<div class="highlight">(<pre><span></span><code>([^<]*)</code>)')  # without highlighting
_COLUMNS = re.compile(r"\S {2,}\S|[─│├└]")
_LONGEST_DESCRIPTION = 300  # characters: search engines and lists of pages show no more


def on_config(config: MkDocsConfig) -> None:
    """Name the pages of notebooks in the navigation, which names the notebooks."""
    config.nav = _with_pages(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for file in [file for file in files if file.src_uri.endswith(_NOTEBOOK)]:
        page = to_markdown(json.loads(file.content_string), posixpath.basename(file.src_uri))
        files.append(File.generated(config, _page_of(file.src_uri), content=page))
    waiting = [file.src_uri for file in files.documentation_pages()]
    waiting += [path for _, path in _entries(config.nav)]
    seen: set[str] = set()
    while waiting:
        uri = waiting.pop()
        if uri in seen:
            continue
        seen.add(uri)
        file = files.get_file_from_path(uri)
        if file is None:
            if not (root / uri).is_file():
                continue  # mkdocs reports it
            file = File(uri, str(root), config.site_dir, config.use_directory_urls)
            file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)
        if file.is_documentation_page():
            waiting += [place for link in _links(file.content_string) if (place := _on_site(file, link[3]))]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = _COMMENT.sub("", markdown)
    if "description" not in page.meta:
        page.meta["description"] = _first_sentence(markdown)
    listed = any(uri == page.file.src_uri for _, uri in _entries(config.nav))
    if listed and not 0 < len(page.meta["description"]) <= _LONGEST_DESCRIPTION:
        log.warning(f"{page.file.src_uri}: begin the page with a paragraph whose first sentence says what it is about")
    return _outside_fences(markdown, lambda text: _LINK.sub(lambda link: _relink(link, page.file), text))


def on_page_content(content: str, **_: Any) -> str:
    return _OUTPUT.sub(_wrapped, content)


def on_page_context(context: Any, page: Page, config: MkDocsConfig, **_: Any) -> None:
    if not page.url:  # the start page, whose heading is the name of the site
        page.meta["title"] = config.site_description


def on_env(env: Any, config: MkDocsConfig, files: Files) -> None:
    """Add llms.txt. All pages have been read by now, and no file of the site is written yet."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    last = ""
    for section, uri in _entries(config.nav):
        if section != last:
            last = section
            lines += ["", f"## {section}", ""]
        file = files.get_file_from_path(uri)
        if file is not None and file.page is not None:
            lines.append(f"- [{file.page.title}]({config.site_url or ''}{file.url}): {file.page.meta['description']}")
    files.append(File.generated(config, "llms.txt", content="\n".join(lines) + "\n"))


def _wrapped(output: re.Match[str]) -> str:
    """A block of output with the class `wrapped`, unless its columns are aligned with spaces."""
    return output[0] if _COLUMNS.search(output[2]) else f'<div class="highlight wrapped">{output[1]}'


def _page_of(uri: str) -> str:
    """The page that shows a file: of a notebook, the one that is made of it."""
    return uri.removesuffix(_NOTEBOOK) + ".md" if uri.endswith(_NOTEBOOK) else uri


def _with_pages(nav: Any) -> Any:
    if isinstance(nav, str):
        return _page_of(nav)
    if isinstance(nav, dict):
        return {title: _with_pages(below) for title, below in nav.items()}
    return nav and [_with_pages(item) for item in nav]


def _entries(nav: Any, section: str = "") -> Iterator[tuple[str, str]]:
    """The pages of the navigation, each with the title of its section."""
    for item in nav:
        for title, below in item.items() if isinstance(item, dict) else [("", item)]:
            if isinstance(below, str):
                yield section, below
            else:
                yield from _entries(below, section or title)


def _links(markdown: str) -> list[re.Match[str]]:
    return list(_LINK.finditer(_FENCE.sub("", _COMMENT.sub("", markdown))))


def _in_repository(file: File, target: str) -> str | None:
    """The path in the repository that a link of a page leads to; None if it leads elsewhere."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    here = file.src_uri if _is_outside(file) else f"docs/{file.src_uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return None if path.startswith("..") else path


def _is_outside(file: File) -> bool:
    """Whether a page of the site is not under docs/."""
    return file.src_dir is not None and Path(file.src_dir).name != "docs"


def _on_site(file: File, target: str) -> str | None:
    """The path on the site that a link of a page leads to; None if the site does not have it."""
    path = _in_repository(file, target)
    if path is None:
        return None
    if path.startswith("docs/"):
        return _page_of(path.removeprefix("docs/"))
    return path if path.endswith((".md", *_FILES)) and path != "README.md" else None


def _relink(link: re.Match[str], file: File) -> str:
    """A link as it is on the site."""
    image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path, place = _in_repository(file, target), _on_site(file, target)
    if path is None:
        return link[0]
    if place is not None:
        relative = posixpath.relpath(place, posixpath.dirname(file.src_uri) or ".")
        return f"{image}[{text}]({relative}{anchor})"
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}` in the repository)"


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph as plain text; empty if the page begins with something else."""
    paragraph = re.match(r"\s*# [^\n]*\n+([A-Za-z*`\[].*?)(\n\n|$)", markdown, re.DOTALL)
    if paragraph is None:
        return ""
    text = re.sub(r"\s+", " ", _LINK.sub(r"\2", paragraph[1]))
    return re.split(r"(?<=[.])\s", text.replace("**", ""))[0]
