// Draw the formulas that arithmatex has marked: \( .. \) in lines, \[ .. \] on lines of their own. A point or a comma
// after a formula moves into its last part, or a line could begin with it.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent;
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
  const after = element.nextSibling, mark = after?.nodeValue?.match(/^[.,;:)?]+/)?.[0];
  const last = [...element.querySelectorAll(".katex-base")].pop();
  if (mark && last) {
    last.append(mark);
    after.nodeValue = after.nodeValue.slice(mark.length);
  }
}

// Short code, such as --top-p, does not break after a hyphen.
for (const code of document.querySelectorAll("article :is(p, li, td, a) > code")) {
  if (code.textContent.length <= 30) code.style.whiteSpace = "nowrap";
}

// The RoPE page follows the palette. Opened from a disk, it is out of reach and follows the system.
const frame = document.querySelector("iframe.page");
if (frame) {
  const follow = () => {
    const page = frame.contentDocument?.documentElement;
    if (page) page.dataset.theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  };
  frame.addEventListener("load", follow);
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}
