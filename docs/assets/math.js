// Draw the formulas that arithmatex has marked: \( .. \) in lines, \[ .. \] on lines of their own.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent;
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
