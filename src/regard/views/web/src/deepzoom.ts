// OpenSeadragon as the map uses it: a canvas, no buttons, crisp cells, nothing fetched but tiles.

import OpenSeadragon from "openseadragon";

const DEEPEST = 88; // pixels a pair at most

export function deepZoom(element: HTMLElement): OpenSeadragon.Viewer {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  return new OpenSeadragon.Viewer({
    element,
    drawer: "canvas",
    showNavigationControl: false,
    imageSmoothingEnabled: false,
    immediateRender: true,
    blendTime: 0,
    animationTime: still ? 0.001 : 0.35,
    springStiffness: 9,
    zoomPerScroll: 1.25,
    visibilityRatio: 0.35,
    minZoomImageRatio: 0.75,
    maxZoomPixelRatio: DEEPEST,
    minPixelRatio: 0.6,
    preserveImageSizeOnResize: true,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true, flickEnabled: true },
    keyboardNavEnabled: false,
  } as unknown as OpenSeadragon.Options);
}

/** The tiles that a picture draws now, which the library's types leave out. */
export function drawnTiles(image: OpenSeadragon.TiledImage): { level: number; x: number; y: number }[] {
  type Drawn = { getTilesToDraw(): { tile: { level: number; x: number; y: number } }[] };
  return (image as unknown as Drawn).getTilesToDraw().map(({ tile }) => tile);
}
