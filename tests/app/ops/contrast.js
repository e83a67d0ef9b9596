// Every text that is shown and has less contrast to what is behind it than 4.5 to 1, by the formula of WCAG.
(() => {
  const parts = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (it) => {
    const colour = parts(getComputedStyle(it).backgroundColor);
    return colour.length === 3 || colour[3] === 1 || !it.parentElement ? colour : behind(it.parentElement);
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const it = node.parentElement;
    if (!node.data.trim() || !it.checkVisibility() || it.closest("template, script, option")) continue;
    const [most, least] = [light(parts(getComputedStyle(it).color)), light(behind(it))].sort((a, b) => b - a);
    const ratio = (most + 0.05) / (least + 0.05);
    if (!(ratio >= 4.5)) low.push(`${node.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
})();
